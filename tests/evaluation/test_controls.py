"""The controls of the default report: cropped context, and the trained window before and after."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import logits, tokens
from cases import TARGET, TRAINED, tiny_llama
from peft import LoraConfig, PeftConfig, VeraConfig, get_peft_model
from scaled_models import scaled_copy
from test_perplexity import measure, texts, tiny
from test_report import row
from test_verdicts import CONTROL, PLAIN, cropped, judged
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.checkpoint.info import info
from rope_extend.checkpoint.record import read_record
from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import PatchError, RopeExtendError
from rope_extend.evaluation.candidates import Candidates
from rope_extend.evaluation.cells import RowSpec
from rope_extend.evaluation.comparison import against_cropped, differences
from rope_extend.evaluation.evaluate import evaluate
from rope_extend.evaluation.evaluation_config import EvaluationConfig, RetrievalConfig
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.report_files import markdown_report
from rope_extend.evaluation.results import SAME_WEIGHTS, EvaluationRow
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.lora import lora_config


def measured(label: str, model, **options) -> EvaluationRow:
    found = measure(model, texts(64, 64, 70, 65), [16, 32, 64], **options)
    return EvaluationRow(label, {"name": "none"}, "m", None, found, TRAINED)


def evaluated(model: Path, **settings) -> list[EvaluationRow]:
    return evaluate(EvaluationConfig(model=model, **settings), progress=False)


@pytest.mark.parametrize(("documents", "length"), [(10, 384), pytest.param(40, 1024, marks=pytest.mark.slow)])
def test_the_unmodified_model_does_not_beat_its_own_control(documents: int, length: int) -> None:
    """Read in windows of the same length, 16 tokens apart: `certain` is wrong in at most 3 of 100 samples."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    texts = rx.load_documents(
        "demo:evaluation", tokenizer, min_tokens=length, max_documents=documents, max_tokens=length
    )
    slid = rx.perplexity(model, texts, 256, protocol="sliding", stride=16, save_losses=True, progress=False)
    losses = np.pad(np.stack(slid.losses[256]), ((0, 0), (1, 0))).astype(np.float64)

    def certain(protocol: str) -> int:
        control = rx.perplexity(model, texts, [256, length], protocol=protocol, window=256, progress=False)
        starts = control.block_edges[:-1]
        whole = replace(
            control, protocol="prefix", window=None, block_nll=np.add.reduceat(losses, starts, axis=1),
            block_terms=np.add.reduceat(np.int64(losses > 0), starts, axis=1),
        )  # fmt: skip
        generator, found = np.random.default_rng(0), 0
        for _ in range(100):
            some = generator.choice(documents, documents // 2, replace=False)
            first, second = (
                replace(each, block_nll=each.block_nll[some], block_terms=each.block_terms[some])
                for each in (control, whole)
            )
            found += second.against(first)[-1].certain
        return found

    assert certain("cropped") <= 3
    if documents == 40:  # whose windows are half new
        assert certain("cropped-half") > 3


LINEAR = judged("linear", 0.9)
ROWS = {
    "none": PLAIN, "control": CONTROL, "linear": LINEAR,
    "other text": replace(LINEAR, result=replace(LINEAR.result, data="f" * 16)),
    "tuned": judged("tuned", 0.8, None, "a"),
    **{name: judged(name, 0.8, None, name) for name in ("good", "weak", "broken")},
    **{f"{name}, cropped": cropped(level, name)
       for name, level in (("good", 0.9), ("weak", 1.1), ("broken", math.nan))},
}  # fmt: skip
CROPPED = [f"{name}, cropped" for name in ("good", "weak", "broken")]


@pytest.mark.parametrize(
    ("names", "controls"),
    [
        (["none", "control", "linear"], {"none": "control", "linear": "control"}),
        (["none", "control", "other text"], {"none": "control"}),
        (["none", "linear"], {}),
        (["control"], {}),
        # What is trained is compared with a control that is trained, if there is one.
        (["linear", "tuned", "control"], {"linear": "control", "tuned": "control"}),
        (["linear", "tuned", "good, cropped", "control"], {"linear": "control", "tuned": "good, cropped"}),
        (["linear", "tuned", "good, cropped"], {"tuned": "good, cropped"}),
        # Of several the best decides, whatever their order; but an adapter has its own, if that is finite.
        *((["control", "tuned", "good", "weak", "broken", *some],
           {"tuned": "good, cropped", "good": "good, cropped", "weak": "weak, cropped",
            "broken": "good, cropped"}) for some in (CROPPED, CROPPED[::-1])),
        (["control", "tuned", "broken, cropped"], {"tuned": "control"}),
    ],
)  # fmt: skip
def test_a_longer_context_is_compared_with_a_cropped_one(names: list[str], controls: dict[str, str]) -> None:
    rows = [ROWS[name] for name in names]
    found = against_cropped(rows)
    assert [(gain.second, gain.first) for gain in found] == [
        (ROWS[name], ROWS[controls[name]]) for name in names if name in controls
    ]
    for gain in found:
        assert gain.differences == gain.second.result.against(gain.first.result)
        assert [change.length for change in gain.differences] == [64]  # equal within 32
    several, text = {*controls.values()}, markdown_report(rows)
    if len(several) == 1:
        assert f"divided by that of {ROWS[several.pop()].label}" in text
    for control in several:
        of = ", ".join(ROWS[name].label for name in names if controls.get(name) == control)
        assert f"The control “{ROWS[control].label}” is that of: {of}." in text


def test_rows_with_other_targets_are_not_compared() -> None:
    whole = measured("none", tiny(), protocol="sliding", stride=16).result
    fewer = replace(whole, document_terms={64: [terms - 1 for terms in whole.document_terms[64]]})
    with pytest.raises(RopeExtendError, match="scored different targets of the same text at 64"):
        differences(fewer, whole, [64])
    text = markdown_report([replace(row("none", "none", 2.0), result=whole, trained_length=TRAINED)])
    assert "No control with a cropped context" in text


@pytest.mark.usefixtures("private_cache")
def test_the_trained_window_is_measured_if_one_pass_gives_it(work: Path) -> None:
    common = {"data": work / "data", "lengths": [16, 64]}
    rows = evaluated(work / "model", methods=["none", "yarn"], **common)
    assert [sorted(one.result.ppl) for one in rows] == [[16, 32, 64]] * 3
    assert [one.result.passes for one in rows] == [1] * 3
    (only,) = evaluated(work / "model", data=work / "data", lengths=[16])
    assert sorted(only.result.ppl) == [16]  # the documents may end before the window does
    strided = evaluated(work / "model", methods=["none"], protocol="sliding", stride=8, max_tokens=99,
                        cropped=False, **common)  # fmt: skip
    assert sorted(strided[0].result.ppl) == [16, 64]


@pytest.mark.parametrize(
    ("settings", "trials"),
    [
        ({"methods": ["none", "as-is"]}, 0),  # nothing changed
        ({"methods": ["yarn"], "retrieval": 0}, 0),
        ({"methods": ["yarn"]}, 4),
        ({"methods": ["none"], "retrieval": 3}, 3),  # asked for by number
        ({"methods": ["none"], "retrieval_lengths": [512]}, 4),
    ],
    ids=str,
)
def test_passkeys_are_asked_if_there_is_something_to_compare(settings: dict[str, Any], trials: int) -> None:
    config = EvaluationConfig(model=str(MODEL_DIR), lengths=(512,), **settings)
    prompts = Measurement(config, texts=False).prompt_settings
    assert (prompts.trials if prompts.tasks else 0) == trials


def test_prompts_have_a_cropped_context_after_training_too(work: Path, plain_adapters: list[str]) -> None:
    """The control of what was trained beyond the old window has the same training within it."""
    config = RetrievalConfig(
        model=str(work / "model"),
        lengths=(64,),
        methods=["none"],
        adapters=plain_adapters,
        tasks=("passkey",),
    )
    labels = [row.label for row in Measurement(config, texts=False).rows]
    within, beyond = "none + LoRA at 32", "none + LoRA at 64"
    assert labels == ["none", "none, cropped to 32", within, f"{within}, cropped to 32", beyond]


@pytest.mark.usefixtures("private_cache")
def test_a_task_that_does_not_fit_the_old_window_is_left_out(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = evaluated(work / "model", data=work / "data", lengths=[64], methods=["yarn"], max_documents=1)
    assert not any(one.retrieval for one in found)
    assert "passkey at 32 is not measured: the task passkey needs about" in caplog.text
    assert "Retrieval, passkey" not in markdown_report(found)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_adapter_with_norms_and_embeddings_leaves_the_model_as_it_was(tied: bool, tmp_path: Path) -> None:
    model, adapter = tiny_llama(tie_word_embeddings=tied), str(tmp_path / "adapter")
    rx.extend(model, TARGET, "yarn")
    recipe = rx.Recipe(
        model="tiny", data="none", output_dir=adapter, target_length=TARGET, train_norm_embed=True,
        lora_rank=2,
    )  # fmt: skip
    tuned = get_peft_model(model, lora_config(model, recipe))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.1)
    rx.save(tuned, adapter)

    model, ids = tiny_llama(tie_word_embeddings=tied), tokens(1, 12)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = logits(model, ids)
    record = read_record(adapter)
    row = RowSpec("tuned", adapter, record.encoding, record)
    candidates = Candidates("tiny", LoadOptions(), model, info(model), (TARGET,), [row])
    with candidates.prepared(model, row) as tuned:
        assert not torch.allclose(logits(tuned, ids), expected)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert torch.equal(logits(model, ids), expected)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (LoraConfig(r=2, target_modules=["q_proj"], bias="all"), r'\(bias="all"\).*\(rope-extend merge, or'),
        (LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"), r"\(pissa\)"),
        (VeraConfig(r=2, target_modules=["q_proj"], bias="all"), "or merge_and_unload of peft and rope"),
    ],
)
def test_an_adapter_that_changes_the_model_itself_is_refused_with_a_merge_that_works(
    config: PeftConfig, advice: str, tmp_path: Path
) -> None:
    """Its row would change the rows that follow, because nothing restores the weights."""
    tiny_llama(attention_bias=True).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rx.extend(model, TARGET, "yarn")
    rx.save(get_peft_model(model, config), tmp_path / "adapter", base_model=str(tmp_path / "base"))
    settings = EvaluationConfig(model=str(tmp_path / "base"), adapters=(str(tmp_path / "adapter"),))
    with pytest.raises(RopeExtendError, match=f"own weights on loading .*{advice}"):
        Candidates.of(settings)
    if isinstance(config, VeraConfig):
        tuned, ids = rx.load(tmp_path / "adapter"), tokens(1, 12)
        expected = logits(tuned, ids)
        rx.save(tuned.merge_and_unload(), tmp_path / "merged")
        torch.testing.assert_close(logits(rx.load(tmp_path / "merged"), ids), expected)


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize(
    "command",
    [
        "evaluate MODEL --lengths 32,128 --plan",
        "evaluate MODEL --lengths 32,128 --data DATA --output OUTPUT",
        "retrieve MODEL --lengths 128 --output OUTPUT",
    ],
)
def test_a_method_that_changes_nothing_is_refused_before_any_weights(
    command: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The rows before it may take hours. An estimate refuses it too."""
    monkeypatch.setattr(LoadOptions, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    model, output = scaled_copy(work / "model", tmp_path, "yarn"), tmp_path / "report"
    places = {"MODEL": str(model), "DATA": str(work / "data"), "OUTPUT": str(output)}
    with pytest.raises(SystemExit):
        main([*(places.get(word, word) for word in command.split()), "--methods", "none,yarn"])
    assert f"yarn leaves the rotary tables of {model} unchanged; leave it out" in capsys.readouterr().err
    assert not output.exists()


def test_plain_rope_with_weights_of_another_encoding_is_not_called_the_model_before(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever trained it: by its record, or by scaling that its config states as its window."""
    model = rx.load_any(work / "model")
    rx.extend(model, 128, "yarn")
    rx.save(model, tmp_path / "saved", tokenizer=rx.load_tokenizer(work / "model"))
    scaled = scaled_copy(work / "model", tmp_path, "yarn")
    same = SAME_WEIGHTS
    for directory, label in ((tmp_path / "saved", same), (scaled, same), (work / "model", "none")):
        config = EvaluationConfig(model=str(directory), methods=("none",), lengths=(32, 128))
        rows = Measurement(config, texts=False).rows
        assert [row.label for row in rows] == [label, f"{label}, cropped to 32"]
    words = ["--lengths", "32,128", "--retrieval", "1", "--output", str(tmp_path / "report")]
    main(["evaluate", str(tmp_path / "saved"), "--data", str(work / "data"), *words])
    text = capsys.readouterr().out
    assert "before " not in text.replace("before its extension", "")
    assert f"- {same}: plain RoPE with the weights of this checkpoint" in text
    assert "| plain RoPE | " in text


def test_a_schedule_by_length_changes_a_model_that_has_its_longest_table(work: Path, tmp_path: Path) -> None:
    """Dynamic YaRN and YaRN have the same table at the target, and others below."""
    model = scaled_copy(work / "model", tmp_path, "yarn")
    config = EvaluationConfig(model=str(model), methods=("as-is", "dynamic_yarn"), lengths=(32, 128))
    candidates, ids = Candidates.of(config), tokens(1, 32)
    lm, found = candidates.load_options.load(candidates.name), []
    for each in candidates.rows:
        with candidates.prepared(lm, each) as extended:
            found.append(logits(extended, ids))
    own, dynamic = found
    assert not torch.allclose(own, dynamic, atol=1e-4)
    with pytest.raises(PatchError, match="use as-is"):
        Candidates.of(EvaluationConfig(model=str(model), methods=("yarn",), lengths=(128,)))


def test_a_sampled_control_shows_no_perplexity_over_other_targets(tmp_path: Path) -> None:
    """Its targets may be easier than all: only ratios on the same targets say how it compares."""
    model = tiny()
    rows = [
        measured("none", model, control_blocks=3),
        measured("none, cropped to 32", model, protocol="cropped", window=TRAINED, blocks=3),
    ]
    control = rows[1].result
    assert control.levels == {16: control.ppl[16], 32: control.ppl[32]}
    assert rows[0].result.levels == rows[0].result.ppl
    line = next(each for each in markdown_report(rows).splitlines() if each.startswith("| none, cropped"))
    assert line.split("|")[-2].strip() == "–"
    every = measured("all", model, protocol="cropped", window=TRAINED, blocks=16).result
    assert every.levels == every.ppl
