"""The advice for well-known checkpoints, from configs written by hand."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from cases import FAMILIES, TRAINED, tiny_config, tiny_llama
from known_models import CONFIGS, a_plan, write_config
from transformers import AutoConfig

import rope_extend as rx
from rope_extend.advice import advice as advising
from rope_extend.advice import advised_recipe, answer
from rope_extend.advice.advice import Advice
from rope_extend.advice.advised_recipe import STEPS
from rope_extend.advice.answer import advise
from rope_extend.advice.describing import describe, describe_work
from rope_extend.advice.question import window_of_config
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.main import main, parse
from rope_extend.cli.measure import model_config
from rope_extend.cli.train import recipe_of
from rope_extend.data.blocks import control_flags
from rope_extend.evaluation.evaluation_config import StudyConfig
from rope_extend.memory.gpus import UTILISATION, Gpu
from rope_extend.models.loading import empty_model
from rope_extend.models.rotary_tables import shape_of
from rope_extend.training.recipe import Recipe
from rope_extend.training.sharding import Sharding
from rope_extend.training.step_plan import TrainingPlan

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0}  # fmt: skip
"""Sizes with which a dry run is quick; windows, bases and families stay those of the checkpoint."""


def small(directory: Path, name: str, **changes: object) -> str:
    return str(write_config(directory, name, **{**SMALL, **changes}))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_window_that_a_model_reads(name: str, tmp_path: Path) -> None:
    window = window_of_config(AutoConfig.from_pretrained(write_config(tmp_path, name)))
    stated = CONFIGS[name]["max_position_embeddings"]  # which those of the cards are, but for Qwen3
    assert window.tokens == (32_768 if name == "qwen3-8b" else stated)
    assert window.stanza == (name in ("qwen25-7b-instruct", "qwen3-8b"))
    assert window.local == {"mistral-7b-v0.1": 4096, "phi3-mini-4k": 2047}.get(name)


@pytest.mark.parametrize(
    ("name", "target", "verdict", "said"),
    [
        ("llama31-8b", "128k", advising.READS_ALREADY, "reads 128k tokens as it is"),
        ("qwen2-7b", "128k", advising.READS_ALREADY, "reads 128k"),
        ("gemma3-1b", "32k", advising.READS_ALREADY, "Nothing is to be done"),
        ("mistral-7b-v0.1", "32k", advising.READS_ALREADY, "No layer attends to more than 4,096"),
        ("mistral-7b-v0.1", "64k", advising.LOCAL, "Choose a model whose layers attend to all tokens"),
        ("phi3-mini-4k", "32k", advising.LOCAL, "2,047"),
        ("qwen25-7b-instruct", "128k", advising.STANZA, "factor 4 over 32k"),
        ("qwen25-7b-instruct", "64k", advising.STANZA, "factor 2 over 32k"),
        ("qwen3-8b", "128k", advising.STANZA, "factor 4 over 32k"),
    ],
)
def test_nothing_is_trained_where_nothing_needs_it(
    name: str, target: str, verdict: str, said: str, tmp_path: Path
) -> None:
    advice = advise(write_config(tmp_path, name), target, engine="vllm")
    assert advice.verdict == verdict
    assert said in advice.reason
    assert not advice.recipe
    assert advice.memory is advice.work is None
    with pytest.raises(rx.RopeExtendError, match="no recipe"):
        advice.recipe_yaml()
    assert advice.verdict in describe(advice)
    assert bool(advice.serving) == (verdict == advising.STANZA)


def test_a_model_that_rope_extend_has_extended_reads_its_new_window(tmp_path: Path) -> None:
    model = tiny_llama()
    with rx.extend(model, 256):
        model.save_pretrained(tmp_path)
    advice = advise(tmp_path, 256)
    assert (advice.verdict, advice.window.tokens) == (advising.READS_ALREADY, 256)


def test_everything_counts_from_the_window_that_qwen3_was_pretrained_on(tmp_path: Path) -> None:
    """Its config says 40,960, with a reserve for the answer; its card's factor counts from 32,768."""
    path = write_config(tmp_path, "qwen3-8b")
    advice = advise(path, "128k", engine="vllm")
    assert (advice.factor, advice.trained_length) == (4.0, 32_768)
    assert "40,960, with a reserve" in advice.window.source
    assert "rx.extend(model, 131072, 'yarn');" in " ".join(advice.serving)
    assert "--max-model-len 131072" in " ".join(advice.serving)
    found = rx.info(path)
    assert (found.shape.trained_length, found.current_length) == (32_768, 32_768)
    assert advise(path, "36k").verdict == advising.STANZA
    model = empty_model(str(path))
    assert rx.extend(model, "128k").encoding == rx.encoding("yarn", factor=4.0)
    # A user's word, and another base, are not corrected.
    assert shape_of(empty_model(str(path)), 40_960).trained_length == 40_960
    other = write_config(tmp_path / "other", "qwen3-8b", rope_theta=5e6)
    assert rx.info(other).shape.trained_length == 40_960


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    directory = write_config(tmp_path_factory.mktemp("models"), "llama3-8b")
    return advise(directory, "32k", gpu="h100", engine="vllm")


def test_llama_3_8b_to_32k(llama3: Advice, tmp_path: Path) -> None:
    assert (llama3.verdict, llama3.factor, llama3.method) == (advising.TRAIN, 4.0, "yarn")
    assert llama3.memory is not None
    assert llama3.memory.fits
    assert llama3.memory.chosen.memory_options.gradient_checkpointing
    assert "quantize" not in llama3.recipe
    # The comment of the recipe for this model that is tested against the plan.
    assert llama3.memory.chosen.total / 1e9 == pytest.approx(32.8, rel=0.02)
    text = llama3.recipe_yaml()
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = Recipe.from_yaml(tmp_path / "recipe.yaml")
    assert {name: getattr(recipe, name) for name in llama3.recipe} == dict(llama3.recipe)
    assert llama3.serving[-1].endswith(f"--max-model-len {recipe.target_length}")
    assert llama3.engines == tuple(TARGETS)
    assert "transformers, vllm, sglang and llama.cpp can run it" in " ".join(describe(llama3).split())


def test_hours_follow_from_the_operations_of_the_model(llama3: Advice) -> None:
    """Counted by hand: 2 operations per weight and token forward, as many backward and in recomputation."""
    work = llama3.work
    assert work is not None
    assert work.tokens == 400 * 8 * 32_768
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    head = 4096 * 128_256
    # LoRA of rank 16 on q, k, v and o: 6 operations per weight, and no more than 1 % of all.
    lora = 6 * 32 * 16 * (4 * 4096 + 2 * (4096 + 1024) + 4096 * 0)
    pairs = (32_768 + 1) / 2
    attention = 32 * 4 * 4096 * pairs
    per_token = 2 * (3 * 32 * layer + 2 * head) + 4 * attention + lora
    assert work.operations / work.tokens == pytest.approx(per_token, rel=0.002)
    seconds = work.operations / 989.4e12
    assert work.hours == pytest.approx(tuple(seconds / share / 3600 for share in reversed(UTILISATION)))
    said = describe_work(llama3.recipe, llama3.memory)
    assert said.startswith("400 steps, 105M tokens")
    assert said[said.index("H100") :] in " ".join(describe(llama3).split())


def test_advice_in_words_and_in_json(llama3: Advice) -> None:
    text = describe(llama3, "my recipe.yaml")
    assert "rope-extend finetune 'my recipe.yaml' --plan" in text
    for part in ("8k tokens", "verdict", "H100", "at least 90 %", "at most 2 %"):
        assert part in text
    assert json.loads(json.dumps(llama3.to_dict()))["recipe"]["target_length"] == 32_768
    for command in llama3.commands:
        words = shlex.split(command)
        assert words[0] == "rope-extend"
        assert parse(words[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [("smollm2-1.7b", "positions from the whole target window do not fit either"),
     ("gemma2-9b", "layers of type sliding_attention attend to 4096 tokens")],
)  # fmt: skip
def test_what_fits_in_no_way_is_said(name: str, why: str, tmp_path: Path) -> None:
    advice = advise(small(tmp_path, name), "32k", gpu="2MB")
    assert advice.memory is not None
    assert not advice.memory.fits
    assert advice.verdict == advising.DOES_NOT_FIT
    assert why in advice.reason


@pytest.mark.parametrize(
    ("way", "accumulation", "planned", "launcher"),
    [
        ("own sequences", 1, "", "torchrun"), ("weights", 1, " --fsdp", "accelerate"),
        ("blocks", 8, "", "torchrun"),
    ],
)  # fmt: skip
def test_several_gpus_share_what_one_cannot_hold(
    way: str, accumulation: int, planned: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, then blocks; the tokens of a step, and the hours of all GPUs together, stay those of one."""

    def plan(recipe: Recipe, *, processes: int, fsdp: bool, **_: object) -> TrainingPlan:
        split = recipe.split_window > 1
        shared = "weights" if fsdp else "blocks" if split else "own sequences"
        sharding = Sharding(weights=fsdp, parts=recipe.split_window, ranks=processes)
        made = a_plan(10**9 if processes == 1 or shared == way else 99 * 10**9)
        return replace(made, recipe=recipe, sharding=sharding)

    monkeypatch.setattr(advised_recipe, "plan", plan)
    monkeypatch.setattr(advised_recipe, "operations_per_token", lambda *_: 1e13)
    model = write_config(tmp_path, "llama3-8b")
    alone, several = (advise(model, "32k", gpu=gpu) for gpu in ("h100", "8xh100"))
    assert several.recipe["gradient_accumulation"] == accumulation
    assert several.recipe.get("split_window", 1) == (8 if way == "blocks" else 1)
    assert (several.work.tokens, several.work.gpu) == (alone.work.tokens, "8 x H100")
    assert several.work.hours == pytest.approx([hours / 8 for hours in alone.work.hours])
    assert "on each of 8 GPUs" in " ".join(describe(several).split())
    first, second, *_ = several.with_recipe_file("my.yaml").commands
    assert first == f"rope-extend finetune my.yaml --plan --processes 8{planned}"
    words = shlex.split(second)
    assert (words[0], words[-4:]) == (launcher, ["-m", "rope_extend", "finetune", "my.yaml"])
    if launcher == "accelerate":
        given = launch_command_parser().parse_args(words[2:])
        assert (given.num_processes, given.use_fsdp, given.fsdp_version) == (8, True, "2")


@pytest.mark.parametrize(("target", "verdict"), [("32k", "does not fit"), ("16k", advising.UNTRAINED)])
def test_a_training_that_does_not_fit_gets_no_recipe(
    target: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Neither hours nor the commands of a training that cannot run; a test without one stays possible."""
    memory = replace(a_plan(99 * 10**9), longest_block=12_096)
    monkeypatch.setattr(answer, "fit", lambda fields, *_: (dict(fields), memory, "its layers are local"))
    file = tmp_path / "recipe.yaml"
    line = ["advise", str(write_config(tmp_path, "smollm2-1.7b")), "--target-length", target, "--gpu", "24GB"]
    main([*line, "--engine", "vllm", "--json"])
    advice = json.loads(capsys.readouterr().out)
    assert advice["verdict"] == verdict
    assert not advice["recipe"]
    assert advice["work"] is None
    lines = [*advice["commands"], *advice["serving"]]
    assert not any("finetune" in line or "runs/" in line for line in lines)
    assert bool(advice["serving"]) == (verdict == advising.UNTRAINED)
    assert bool(advice["commands"]) == bool(advice["criteria"]) == (verdict == advising.UNTRAINED)
    for part in ("99.0 GB of 24.0 GB", "12,096 tokens", "its layers are local", "larger GPU"):
        assert part in advice["reason"]
    main([*line, "--output", str(file)])
    assert not file.exists()
    assert "there is no recipe, because no step fits the GPU" in capsys.readouterr().out


@pytest.mark.parametrize(("engine", "method"), [(None, "jet_long"), ("sglang", "yarn")])
def test_up_to_twice_the_window_an_untrained_method_comes_first(
    engine: str | None, method: str, tmp_path: Path
) -> None:
    """An engine's method does not follow the length."""
    advice = advise(small(tmp_path, "smollm2-1.7b", num_hidden_layers=1), "16k", engine=engine)
    assert (advice.verdict, advice.untrained_method) == (advising.UNTRAINED, method)
    assert f"none,{method}" in advice.commands[0]
    text = describe(advice)
    assert all(line in text for line in advice.serving)
    assert ("serve, after the training" in text) == (engine is not None)


def test_where_no_method_acts_inside_attention_the_untrained_one_has_tables(tmp_path: Path) -> None:
    (case,) = (case for case in FAMILIES if case.model_type == "gpt_neox_japanese")
    tiny_config(case).save_pretrained(tmp_path)
    assert advise(tmp_path, 2 * TRAINED).untrained_method == "dynamic_yarn"


@pytest.mark.slow
def test_an_engine_that_cannot_run_a_family_is_named_with_the_reason(tmp_path: Path) -> None:
    advice = advise(small(tmp_path, "gemma3-1b", num_hidden_layers=6), "64k", engine="vllm")
    text = " ".join(describe(advice).split())
    assert "# vllm does not run yarn of this family: we do not know how" in text
    assert advice.engines == ("transformers",)
    assert "(2309.00071); transformers can run it" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "h1000"}, "no GPU is known as 'h1000'"),
        ({"engine": "ollama"}, "engine must be one of"),
        ({"target_length": "32kb"}, "not a length"),
        ({"target_length": 1}, "target_length must be at least 2 tokens, got 1"),
    ],
)
def test_mistakes(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    options = {"target_length": "32k", **arguments}
    with pytest.raises(rx.RopeExtendError, match=message):
        advise(write_config(tmp_path, "llama3-8b"), **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_notes_say_what_is_special_about_a_checkpoint(tmp_path: Path) -> None:
    model = small(tmp_path, "qwen2-7b", quantization_config={"quant_method": "gptq", "bits": 4})
    advice = advise(model, "128k", trained_length=32_768)
    assert any("quantised" in note for note in advice.notes)
    assert not any("scaling already" in note for note in advice.notes)
    assert advice.recipe["trained_length"] == 32_768
    scaled = small(tmp_path / "scaled", "llama31-8b")
    assert any("start: current" in note for note in advise(scaled, "256k").notes)


@pytest.mark.parametrize(
    ("scaling", "window", "start", "counted"),
    [
        ({**CONFIGS["llama31-8b"]["rope_scaling"]}, 131_072, "current", 131_072),
        # As the card of Qwen2.5 says, with the window of pretraining in max_position_embeddings.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
         32_768, "pretrained", 32_768),
    ],
)  # fmt: skip
def test_a_model_that_was_trained_under_scaling_is_extended_from_there(
    scaling: dict[str, object],
    window: int,
    start: str,
    counted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every line counts from the same window: the recipe and its controls."""
    asked = []

    def fitting(
        fields: dict[str, object], trained: int, gpu: Gpu
    ) -> tuple[dict[str, object], TrainingPlan, str | None]:
        asked.append(trained)
        return fields, a_plan(), None

    monkeypatch.setattr(answer, "fit", fitting)
    monkeypatch.setattr(advised_recipe, "operations_per_token", lambda *_: None)
    model = small(tmp_path, "llama31-8b", max_position_embeddings=window, rope_scaling=scaling)
    advice = advise(model, "256k")
    assert advice.window.tokens == 131_072
    assert (advice.start, advice.trained_length, asked) == (start, counted, [counted])
    assert advice.factor == 262_144 / counted
    assert advice.recipe.get("start", "pretrained") == start
    assert (advice.recipe["steps"], advice.recipe["gradient_accumulation"]) == (STEPS, 1)
    (tmp_path / "recipe.yaml").write_text(advice.recipe_yaml())
    assert Recipe.from_yaml(tmp_path / "recipe.yaml").start == start
    measuring, own = advice.commands[3:], start == "current"
    assert sum("--protocol cropped --window 128k" in command for command in measuring) == own
    assert sum(f"--methods {'as-is' if own else 'none'}" in command for command in measuring) == (
        3 if own else 1
    )
    assert ("The control is as-is" if own else "`none` is plain RoPE") in " ".join(advice.notes)


@pytest.mark.parametrize(
    ("window", "tokens", "scaling"),
    [
        (4096, 4096, {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}),
        (4096, 4096, {"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096,
                      "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}),
        (4096, 16_384, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
        (16_384, 16_384, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
        (5120, 16_384, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
    ],
)  # fmt: skip
def test_only_the_factor_of_yarn_gives_the_window(
    window: int, tokens: int, scaling: dict[str, object], tmp_path: Path
) -> None:
    """`advise` and `info` read the same window."""
    model = small(tmp_path, "llama2-7b", max_position_embeddings=window, rope_scaling=scaling)
    assert window_of_config(AutoConfig.from_pretrained(model)).tokens == tokens
    assert rx.info(model).current_length == tokens


@pytest.mark.parametrize("factor", ["4", -1.0, float("inf"), True])
def test_a_factor_that_is_no_number_above_0_is_refused(factor: object) -> None:
    """A factor in quotes would repeat the digits of the window."""
    config = AutoConfig.for_model("llama")
    config.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    with pytest.raises(rx.RopeExtendError, match="config: factor must be a finite number"):
        window_of_config(config)
    config.rope_parameters["factor"], config.max_position_embeddings = 4.0, -1
    with pytest.raises(rx.RopeExtendError, match="config: max_position_embeddings must be"):
        window_of_config(config)


def test_a_window_that_the_user_knows_to_be_longer_is_read_already(tmp_path: Path) -> None:
    model = write_config(tmp_path, "llama3-8b")
    advice = advise(model, "32k", trained_length=65_536)
    assert (advice.verdict, advice.window.tokens) == (advising.READS_ALREADY, 65_536)
    assert "reads 64k tokens as it is" in advice.reason
    assert "You say so, and its config says 8k" in advice.reason
    assert "--lengths 32k --trained-length 64k" in advice.commands[0]


def test_an_adapter_is_refused_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(rx.RopeExtendError, match="give its base model"):
        advise(tmp_path, "32k")


def test_a_sliding_window_longer_than_the_context_is_no_limit(tmp_path: Path) -> None:
    window = window_of_config(
        AutoConfig.from_pretrained(write_config(tmp_path, "mistral-7b-v0.1", sliding_window=65_536))
    )
    assert window.local is None


def test_a_family_without_rope_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(rx.RopeExtendError, match="no support for model_type"):
        advise(tmp_path, "32k")


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize(("target", "window"), [(384, 256), (2048, 1024)])  # passkeys need 256
def test_the_commands_run_as_they_are_printed(
    target: int, window: int, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From advice to a verdict, on tiny models: only the long documents have another name."""
    monkeypatch.chdir(tmp_path)
    model, texts, file = tmp_path / "model", tmp_path / "texts", tmp_path / "recipe.yaml"
    shutil.copytree(work / "model", model)
    config = json.loads((model / "config.json").read_text())
    if window == 1024:
        scaling = {"factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
        config["rope_parameters"] = {**CONFIGS["llama31-8b"]["rope_scaling"], **scaling}
    config["max_position_embeddings"] = window
    (model / "config.json").write_text(json.dumps(config))
    texts.mkdir()
    for text in (work / "data").iterdir():
        (texts / text.name).write_text(8 * text.read_text())
    line = ["advise", str(model), "--target-length", str(target), "--data", str(texts)]
    main([*line, "--output", str(file)])
    said = capsys.readouterr().out
    assert f"written: {file}" in said
    with pytest.raises(SystemExit) as error:
        main([*line, "--output", str(file)])
    assert error.value.code == 2
    assert "--overwrite" in capsys.readouterr().err
    commands = [line.strip() for line in said.splitlines() if line.startswith("  rope-extend ")]
    tokens, printed = [], ""
    for command in commands:
        words = shlex.split(re.sub("path/to/other/documents", str(texts), command))[1:]
        if words[0] == "finetune":
            recipe = recipe_of(parse(words))
            tokens.append(recipe.steps * recipe.gradient_accumulation * recipe.batch_size * recipe.length)
            words += ["--steps", "2", "--gradient-accumulation", "1", "--dtype", "float32"]
        main([*words, "--trials", "1"] if words[0] in ("retrieve", "report") else words)
        printed += capsys.readouterr().out
    trained, compared = (re.findall(f"  rope-extend ({name} .*)", printed) for name in ("finetune", "report"))
    assert len(trained) == len(compared) == (window == 256)  # an extended table has another control
    for command in compared:
        assert recipe_of(parse(shlex.split(trained[0]))).method == "none"
        config = model_config(StudyConfig, parse(shlex.split(command)))
        assert (len(config.adapters), config.lengths) == (2, (window, target))
        assert "a control: give it to `rope-extend report`" in printed
    assert tokens == pytest.approx([tokens[0]] * 3, rel=0.002)
    recipe, control = (Recipe.from_yaml(path) for path in sorted(tmp_path.glob("runs/*/recipe.yaml"))[:2])
    assert (recipe.method, recipe.target_length) == ("yarn", target)
    assert (control.method, control.target_length) == ("none", window)
    assert ("none + LoRA at 256" in printed) == (window == 256)
    assert "before training" not in printed
    main([*line, "--json"])
    assert json.loads(capsys.readouterr().out)["recipe_file"] is None


@pytest.mark.parametrize(
    ("length", "blocks", "more", "said"),
    [
        (131_072, 2, {}, "32 --steps 400"), (12_288, 1, {}, "2 --steps 300"),
        (8192, 8, {"target_length": 32_768, "positions": "pose"}, "8 --steps 400 --positions consecutive"),
        (262_144, 1, {"eval_lengths": (131_072,)}, "32 --steps 400 --eval-lengths 8k"),
    ],
)  # fmt: skip
def test_the_control_has_as_many_tokens(length: int, blocks: int, more: dict[str, Any], said: str) -> None:
    lengths = {"target_length": length, "block_length": length, **more}
    flags = control_flags({"gradient_accumulation": blocks, "steps": 400, **lengths}, 8192)
    assert flags == f"--method none --target-length 8k --block-length 8k --gradient-accumulation {said}"
    count, steps = (int(word) for word in said.split()[:3:2])
    assert count * steps * 8192 == blocks * 400 * length
