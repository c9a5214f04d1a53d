"""What a step is foretold to take against what it takes, the levers chosen by it, and what is refused."""

from __future__ import annotations

import copy
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, tiny_config
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from rope_extend import RopeExtendError, finetune
from rope_extend.cli import main
from rope_extend.data import Document
from rope_extend.demo import MODEL_DIR as MODEL
from rope_extend.evaluation import perplexity
from rope_extend.evaluation.memory import LiveBytes
from rope_extend.hardware import Hardware
from rope_extend.loss import NextTokenLoss
from rope_extend.training import plan as planning
from rope_extend.training.finetune import plan
from rope_extend.training.levers import TILE, Levers, pull
from rope_extend.training.loop import adapted, extended
from rope_extend.training.plan import TrainingPlan, continued, plan_training
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import RunState, read_state

CPU = Hardware(device="cpu", dtype=torch.float32)
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
LADDER = [Levers(), Levers(True), Levers(True, TILE)]


def recipe(model: Any, **changes: Any) -> Recipe:
    return Recipe(**{
        "model": str(model), "data": "books", "output_dir": "runs/one", "target_length": 4096,
        "lora_targets": "all-linear", "gradient_accumulation": 1, **changes,
    })  # fmt: skip


def made(run: Recipe, **how: Any) -> TrainingPlan:
    found = plan_training(run, **{"hardware": CPU, **how})
    assert found is not None
    return found


def measured(run: Recipe, levers: Levers, dtype: torch.dtype, config: Any = None) -> tuple[int, int]:
    """Bytes held at the end of the second step's forward pass, and at most, by what operations returned."""
    if config is None:
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    extended(model, run)
    adapter = adapted(model, run).train()
    parameters = [value for value in adapter.parameters() if value.requires_grad]
    optimizer, objective = torch.optim.AdamW(parameters), NextTokenLoss(adapter)
    memory = LiveBytes()
    for tensor in (*adapter.parameters(), *adapter.buffers()):
        memory.add(tensor)
    ids = torch.randint(0, 60, (run.batch_size, run.length))
    kept = 0
    with pull(model, levers), memory:
        for _ in range(2):
            memory.peak = memory.live
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = objective(input_ids=ids)
            kept = memory.live
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, run.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return kept, memory.peak


# ------------------------------------------------------------------------------- foretold and measured


@pytest.mark.parametrize(
    ("levers", "dtype", "changes"),
    [
        (Levers(), torch.float32, {}),
        (Levers(True), torch.float32, {"lora_targets": "attention"}),
        (Levers(True, 128), torch.float32, {"batch_size": 2}),
        (Levers(False, 128), torch.bfloat16, {}),
        (Levers(True, 128, True), torch.bfloat16, {"train_norm_embed": True}),
        (Levers(True), torch.float32, {"method": "alibi"}),
        (Levers(), torch.float32, {"method": "linear_attention"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_memory_is_what_was_foretold(
    levers: Levers, dtype: torch.dtype, changes: dict[str, Any], tokens: int
) -> None:
    """To 5 %, on the bundled model, whose rehearsal leaves most layers out."""
    run = recipe(MODEL, block_length=tokens, **changes)
    step = made(run, hardware=replace(CPU, dtype=dtype), levers=levers).chosen
    kept, peak = measured(run, levers, dtype)
    assert step.total == pytest.approx(peak, rel=0.05)
    assert step.weights + step.trained + step.saved == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize(("method", "masked"), [("yarn", False), ("dynamic_ntk", True)])
def test_packed_documents_take_a_mask_where_the_encoding_acts_inside_attention(
    method: str, masked: bool
) -> None:
    run = recipe(MODEL, block_length=1024, method=method)
    packed = replace(run, packing="restart")
    alone, together = (made(one, levers=Levers(True)).chosen.total for one in (run, packed))
    assert together - alone == (pytest.approx(1024**2, rel=0.01) if masked else 0)


@pytest.mark.parametrize("levers", [Levers(), Levers(True, 128)], ids=str)
def test_memory_of_a_longer_block_is_foretold(levers: Levers) -> None:
    run = recipe(MODEL, block_length=1024)
    total = made(run, levers=levers).chosen.total
    assert total == pytest.approx(measured(run, levers, torch.float32)[1], rel=0.02)


def test_learned_biases_are_trained_in_the_rehearsal_too() -> None:
    run = recipe(MODEL, block_length=512, method="fire", method_parameters={"width": 8})
    step = made(run, levers=Levers(True)).chosen
    assert step.total == pytest.approx(measured(run, Levers(True), torch.float32)[1], rel=0.1)


@pytest.mark.parametrize(
    ("method", "dtype", "levers"),
    [
        ("yarn", torch.float32, Levers()),
        ("yarn", torch.float32, Levers(True, 128)),
        ("linear", torch.bfloat16, Levers(True)),
        ("dynamic_ntk", torch.float32, Levers(True)),
        ("alibi", torch.float32, Levers()),
        ("t5_bias", torch.float32, Levers(True)),
        ("learned", torch.float32, Levers(True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["in one piece", "layer by layer"])
def test_evaluations_of_a_run_take_what_was_foretold(
    method: str, dtype: torch.dtype, levers: Levers, way: str
) -> None:
    """To 5 %, with the adapter and the optimizer's moments; in pieces where there is no room for more."""
    run, cpu = recipe(MODEL, block_length=64, method=method), replace(CPU, dtype=dtype)
    foretold = made(run, hardware=cpu, levers=levers, evaluated=[256, 2048]).evaluation
    assert foretold is not None
    if way != "in one piece":
        less = replace(cpu, limit_memory=int(0.9 * foretold.memory))
        foretold = made(run, hardware=less, levers=levers, evaluated=[256, 2048]).evaluation
        assert foretold is not None
        assert foretold.at_once < 2048
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype)
    extended(model, run)
    adapter = adapted(model, run)
    parameters = [value for value in adapter.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    memory = LiveBytes()
    for tensor in (*adapter.parameters(), *adapter.buffers()):
        memory.add(tensor)
    text = [Document("text", torch.randint(0, 60, (2048,)))]
    with pull(model, levers), memory, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        memory.peak = memory.live
        perplexity(adapter.eval(), text, [2048], suggested_chunk=foretold.at_once, progress=False)
    assert foretold.memory == pytest.approx(memory.peak, rel=0.05)
    assert foretold.way == way
    assert foretold.fits


SHAPES: dict[str, PretrainedConfig] = {
    "large vocabulary": LlamaConfig(
        vocab_size=32_768, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True, max_position_embeddings=256,
    ),
    "small": LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256,
    ),
    "sliding window": Qwen2Config(
        vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=100, max_position_embeddings=256,
        layer_types=["full_attention", "sliding_attention"] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("levers", [Levers(), Levers(True, 128)], ids=str)
def test_other_shapes_are_foretold_too(name: str, levers: Levers, tmp_path: Path) -> None:
    SHAPES[name].save_pretrained(tmp_path)
    run = recipe(tmp_path, target_length=1024)
    step = made(run, levers=levers).chosen
    assert step.total == pytest.approx(measured(run, levers, torch.float32, SHAPES[name])[1], rel=0.05)


def test_layers_left_out_of_the_rehearsal_count_as_if_they_were_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for levers in LADDER:
        monkeypatch.setattr(planning, "DEPTH", 2)
        few = asdict(made(recipe(MODEL), levers=levers).chosen)
        monkeypatch.setattr(planning, "DEPTH", 100)
        for key, value in asdict(made(recipe(MODEL), levers=levers).chosen).items():
            assert few[key] == (pytest.approx(value, rel=0.02) if key != "levers" else value), key


def test_accumulated_gradients_wait_and_processes_keep_them_twice() -> None:
    run = recipe(MODEL, block_length=256, train_norm_embed=True)
    alone = made(run).chosen
    trained = alone.trained / 3  # a weight, and its two moments
    waiting = made(replace(run, gradient_accumulation=2)).chosen
    assert waiting.total - alone.total == pytest.approx(trained, rel=0.3)
    shared = made(run, processes=2).chosen
    assert shared.trained == pytest.approx(4 * trained, rel=0.05)


def test_four_bits_and_offloading_are_foretold_for_a_gpu_that_is_not_here() -> None:
    run = recipe(MODEL)
    found = plan(run, limit_memory=80 * 10**9)
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert [step.levers for step in found.steps] == [*LADDER, Levers(True, TILE, True)]
    assert found.place.type == "cuda"
    assert found.available == 80 * 10**9
    tiled, offloaded = found.steps[-2:]
    assert offloaded.host + offloaded.saved == tiled.saved
    assert offloaded.host > tiled.saved / 2
    config = LlamaConfig.from_pretrained(MODEL)
    states = config.num_hidden_layers * 4096 * config.hidden_size * 2
    assert offloaded.host == pytest.approx(states, rel=0.2)  # in bfloat16
    assert found.quantized is not None
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # The layers' matrices alone; the adapter's stay as they are, and one at a time is brought back.
    matrices = [part.weight for name, part in empty.named_modules() if name.endswith("_proj")]
    small = sum(weight.numel() for weight in matrices) * (2 - 0.5625) - max(w.nbytes for w in matrices)
    assert offloaded.weights - found.quantized.weights == pytest.approx(small, rel=1e-3)


def test_a_model_that_is_there_already_is_planned_by_its_own_weights() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    run = recipe(MODEL)
    assert made(run, model=model).chosen == made(run).chosen


# ------------------------------------------------------------------------------------------- what is chosen


def limited(limit: float) -> Hardware:
    return replace(CPU, limit_memory=int(limit))


def test_as_few_levers_as_are_needed_the_cheapest_first(tmp_path: Path) -> None:
    SHAPES["small"].save_pretrained(tmp_path)
    run = recipe(tmp_path, target_length=8192)
    totals = [made(run, levers=levers).chosen.total for levers in LADDER]
    assert totals == sorted(totals, reverse=True)
    for total, levers in zip(totals[:2], LADDER, strict=False):
        found = made(run, hardware=limited(total / 0.94))
        assert found.chosen.levers == levers
        assert len(found.steps) == 1 + LADDER.index(levers)
        found.check()
    assert made(run, hardware=limited(totals[0] / 0.96)).chosen.levers == Levers(True)


def test_what_the_recipe_says_is_not_changed() -> None:
    run = recipe(MODEL, gradient_checkpointing=False, mlp_tiles=0)
    found = made(run, hardware=limited(5e7))
    assert [step.levers for step in found.steps] == [Levers()]
    with pytest.raises(RopeExtendError, match="gradient_checkpointing and mlp_tiles on auto"):
        found.check()
    found = made(replace(run, gradient_checkpointing=True, mlp_tiles=100, offload_checkpoints=True))
    assert found.chosen.levers == Levers(True, 100, True)
    table = str(plan(recipe(MODEL, offload_checkpoints=True)))
    assert "\ngradient checkpointing, checkpoints offloaded to host memory " in table
    assert "\n+ MLP in tiles of 1,024 tokens " in table


def test_a_block_that_cannot_fit_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    SHAPES["small"].save_pretrained(tmp_path)
    run = recipe(tmp_path, target_length=8192, batch_size=2)
    need = made(run, levers=LADDER[-1]).chosen.total
    found = made(run, hardware=limited(need / 2))
    assert found.most is not None
    assert 0 < found.most < 8192
    words = rf"2 x 8,192 tokens needs about .* blocks of up to {found.most:,} tokens fit.*smaller batch_size"
    with pytest.raises(RopeExtendError, match=words):
        found.check()
    short = replace(run, block_length=found.most)
    made(short, hardware=limited(need / 2)).check()
    beyond = replace(run, block_length=found.most + max(64, found.most // 64))
    with pytest.raises(RopeExtendError):
        made(beyond, hardware=limited(need / 2)).check()
    none = made(run, hardware=limited(1000))
    with pytest.raises(RopeExtendError, match="no block fits"):
        none.check()


@pytest.mark.parametrize("edge", [63, 64, 65, 200, 3000, 8100, 100_000, 1_000_000])
@pytest.mark.parametrize("curve", [1.0, 2.0, 0.5])
def test_the_longest_block_is_found_on_any_curve(edge: int, curve: float) -> None:
    """To a 64th, in a few looks."""
    looks = []

    def share(tokens: int) -> float:
        looks.append(tokens)
        return float(0.2 + 0.8 * (tokens / edge) ** curve)

    found = planning._most(share, 2**20 if edge > 8192 else 8192)
    assert edge - max(64, edge / 64) < found + 1 <= edge + 1
    assert len(looks) <= (6 if curve == 1 else 20)


def test_what_a_family_does_not_have_is_said(tmp_path: Path) -> None:
    def remarks(name: str) -> str:
        case = next(case for case in FAMILIES if case.model_type == name)
        tiny_config(case).save_pretrained(tmp_path / name)
        run = recipe(tmp_path / name, target_length=2048, lora_targets="attention")
        return "\n".join(plan(run).remarks)

    assert "no MLP is run in tiles: MixtralSparseMoeBlock holds a" in remarks("mixtral")
    assert "some MLPs are not run in tiles: DeepseekV2Moe holds a" in remarks("deepseek_v2")
    assert "does not recompute its layers" in remarks("gpt_neox_japanese")
    run = recipe(tmp_path / "mixtral", mlp_tiles=64)
    with pytest.raises(RopeExtendError, match="no MLP of MixtralForCausalLM can be run in tiles"):
        plan(run)
    run = recipe(tmp_path / "gpt_neox_japanese", gradient_checkpointing=True)
    with pytest.raises(RopeExtendError, match="does not recompute its layers"):
        plan(run)


# ------------------------------------------------------------------------------------------------ the run


def settings(work: Path) -> dict[str, Any]:
    return {
        "model": str(work / "model"), "data": str(work / "data"), "target_length": 128, "steps": 2,
        "gradient_accumulation": 1, "lora_rank": 4, "lora_dropout": 0.2, "lora_targets": "all-linear",
        "save_every": 1,
    }  # fmt: skip


@pytest.fixture
def tiny(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(**settings(work), output_dir=str(tmp_path / "run"))


def test_the_levers_of_a_run_are_recorded_and_kept_when_it_goes_on(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning, "TILE", 16)
    need = made(replace(tiny, target_length=128), levers=Levers(True, 16)).chosen.total
    with caplog.at_level("INFO", "rope_extend"):
        finetune(replace(tiny, steps=1), limit_memory=int(need / 0.94))
    assert "levers: gradient checkpointing, MLP in tiles of 16 tokens" in caplog.text
    checkpoint = Path(tiny.output_dir) / "checkpoints" / "step-1"
    assert read_state(checkpoint).levers == asdict(Levers(True, 16))
    result = finetune(tiny, resume=True)  # with all the memory there is
    last = Path(tiny.output_dir) / "checkpoints" / "step-2"
    assert read_state(last).levers == asdict(Levers(True, 16))
    whole = replace(tiny, output_dir=tiny.output_dir + "-whole", mlp_tiles=16)
    straight = finetune(whole)
    assert result.loss == straight.loss
    for (name, value), other in zip(
        result.model.named_parameters(), straight.model.parameters(), strict=True
    ):
        assert torch.equal(value, other), name


def test_runs_with_and_without_levers_train_alike(tiny: Recipe) -> None:
    undropped = replace(tiny, lora_dropout=0.0)
    runs = [
        finetune(replace(undropped, output_dir=f"{tiny.output_dir}-{number}", **levers))
        for number, levers in enumerate(
            (
                {"gradient_checkpointing": False},
                {"gradient_checkpointing": True, "mlp_tiles": 16, "offload_checkpoints": True},
            )
        )
    ]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-6)
    assert not any("forward" in vars(module) for module in runs[1].model.modules())


def test_what_a_run_that_goes_on_may_change(tiny: Recipe) -> None:
    state = RunState(1, 0, 0.0, "", 1, tiny.to_dict(), levers=asdict(Levers(True, 16, True)))
    assert continued(tiny, state) == Levers(True, 16, True)
    assert continued(replace(tiny, gradient_checkpointing=False), state) == Levers(False, 16)
    assert continued(replace(tiny, offload_checkpoints=False), state) == Levers(True, 16)
    before = {**tiny.to_dict(), "gradient_checkpointing": False}
    assert continued(tiny, replace(state, levers=None, recipe=before)) == Levers()
    del before["gradient_checkpointing"]
    assert continued(tiny, replace(state, levers=None, recipe=before)) == Levers(True)
    off = replace(state, levers=asdict(Levers()))
    assert continued(replace(tiny, offload_checkpoints=True), off) == Levers(True, 0, True)


def test_a_run_is_refused_before_its_weights_and_data_are_read(tiny: Recipe, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(tiny.model) / name).read_bytes())  # there are no weights
    with pytest.raises(RopeExtendError, match="1 x 128 tokens needs about"):
        finetune(replace(tiny, model=str(tmp_path), data="nowhere"), limit_memory=10_000)
    assert not Path(tiny.output_dir).exists()


def test_a_run_evaluates_in_pieces_as_was_foretold(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained fits with room to spare; a window to evaluate at, far beyond it, only in pieces."""
    run = replace(tiny, steps=1, target_length=1024, positions="pose", block_length=64, eval_data=tiny.data,
                  eval_lengths=(1024,), eval_documents=1)  # fmt: skip
    whole = made(run, evaluated=[1024])
    assert whole.evaluation is not None
    assert whole.evaluation.way == "in one piece"
    assert whole.evaluation.memory == whole.total > whole.chosen.total
    room = int(0.9 * whole.total)
    less = made(run, evaluated=[1024], hardware=replace(CPU, limit_memory=room)).evaluation
    assert less is not None
    asked = []

    def spy(*args: Any, **options: Any) -> Any:
        asked.append(options["suggested_chunk"])
        return perplexity(*args, **options)

    monkeypatch.setattr("rope_extend.training.loop.perplexity", spy)
    finetune(run, limit_memory=room)
    assert asked == [less.at_once] * 2
    assert less.at_once < 1024
    with pytest.raises(RopeExtendError, match=r"evaluations at 1,024 tokens need .* up to \d+ tokens fit"):
        finetune(replace(run, data="nowhere"), overwrite=True, limit_memory=int(0.6 * whole.total))


def test_a_run_whose_evaluations_cannot_be_rehearsed_is_planned_without(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("needs values")

    monkeypatch.setattr(planning.ReadingRehearsal, "reading", fail)
    found = plan(replace(tiny, eval_data=tiny.data))
    assert found.evaluation is None
    assert found.chosen.total == found.total == plan(tiny).total


def test_a_family_that_cannot_be_rehearsed_trains_with_what_the_recipe_says(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("needs values")

    monkeypatch.setattr(planning._StepRehearsal, "step", fail)
    finetune(replace(tiny, steps=1))
    checkpoint = Path(tiny.output_dir) / "checkpoints" / "step-1"
    assert read_state(checkpoint).levers == asdict(Levers(True))
    with pytest.raises(RopeExtendError, match="cannot be foretold"):
        plan(tiny)


def test_four_bits_need_bitsandbytes_and_a_model_by_name(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.model)
    with pytest.raises(RopeExtendError, match="this model is loaded already"):
        finetune(replace(tiny, quantize="4bit"), model=model)
    monkeypatch.setattr("rope_extend.hardware.importlib.util.find_spec", lambda name: None)
    with pytest.raises(RopeExtendError, match="needs bitsandbytes"):
        plan(replace(tiny, quantize="4bit"))


def test_four_bits_train_with_every_other_lever(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    run = replace(tiny, quantize="4bit", gradient_checkpointing=True, mlp_tiles=16, offload_checkpoints=True)
    result = finetune(run)
    mlp = result.model.get_base_model().model.layers[0].mlp
    assert type(mlp.up_proj.base_layer).__name__ == "Linear4bit"
    assert mlp.up_proj.base_layer.weight.dtype == torch.uint8
    assert 0 < result.loss < 10
    demo = replace(run, model=str(MODEL), target_length=512)
    plain = made(replace(demo, quantize=None)).chosen
    small = made(demo, hardware=Hardware("cpu", dtype=torch.float32, quantize="4bit")).chosen
    loaded = Hardware("cpu", dtype=torch.float32, quantize="4bit").load(str(MODEL))
    held = sum(value.nbytes for value in loaded.parameters())
    assert small.quantized
    assert small.weights == pytest.approx(held, rel=0.2)  # that has no scales, nor a matrix brought back
    assert held <= small.weights < plain.weights / 2


def test_contradictions_in_a_recipe_are_refused() -> None:
    with pytest.raises(RopeExtendError, match="gradient_checkpointing is false"):
        recipe(MODEL, gradient_checkpointing=False, offload_checkpoints=True)
    for name, value in (("mlp_tiles", -1), ("mlp_tiles", True), ("offload_checkpoints", "yes"),
                        ("quantize", "3bit"), ("expandable_segments", 1)):  # fmt: skip
        with pytest.raises(RopeExtendError, match=f"recipe: {name} must be"):
            recipe(MODEL, **{name: value})


# -------------------------------------------------------------------------------------------- command line


def test_the_command_prints_the_plan_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"finetune --plan --model {MODEL} --data nowhere --output-dir {tmp_path / 'run'}"
    main(shlex.split(f"{command} --target-length 4k"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plan: steps of 1 x 4,096 tokens, ")
    assert lines[1].split() == [
        "levers",
        "weights",
        "trained",
        "saved",
        "forward",
        "backward",
        "total",
        "in",
        "host",
    ]
    assert [line[:44].strip() for line in lines[2:5]] == [
        "no levers", "+ gradient checkpointing", "+ MLP in tiles of 1,024 tokens",
    ]  # fmt: skip
    assert sum(line.endswith("chosen") for line in lines) == 1
    assert "evaluation" not in "".join(lines)
    main(shlex.split(f"{command} --target-length 4k --eval-data nowhere --eval-lengths 256,8k"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"evaluation at 8,192 tokens +[\d.]+ [MG]B +-  fits, in one piece", last)
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_a_window_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"finetune --plan --model {MODEL} --data nowhere --output-dir {tmp_path} --target-length 1024k"
    with pytest.raises(SystemExit):
        main(shlex.split(f"{command} --limit-memory 300MB"))
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    assert "1 x 1,048,576 tokens needs about" in captured.err
    assert "tokens fit" in captured.err


SHAPES_OF_CONFIGS = {
    "llama3_8b": LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    ),
    "llama_7b": LlamaConfig(max_position_embeddings=4096),  # the defaults are the first Llama's
    "tinyllama_1b": LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "A step takes" in path.read_text()], ids=lambda path: path.stem
)
def test_the_memory_that_recipes_name_is_what_is_foretold(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parents[1])
    said = re.search(r"^# A step takes ([\d.]+) GB", path.read_text(), re.MULTILINE)
    assert said is not None
    shape = next((shape for name, shape in SHAPES_OF_CONFIGS.items() if path.stem.startswith(name)), None)
    changes = {}
    if shape is None and torch.cuda.is_available():
        pytest.skip("what the bundled model takes is said for a CPU")
    if shape is not None:
        shape.save_pretrained(tmp_path)
        changes["model"] = str(tmp_path)
    limit = None if shape is None else (24 if "1b" in path.stem else 80) * 10**9
    found = plan(Recipe.from_yaml(path, changes), limit_memory=limit)
    assert found.fits(found.chosen)
    assert found.chosen.total / 1e9 == pytest.approx(float(said[1]), abs=0.051, rel=0.01)
