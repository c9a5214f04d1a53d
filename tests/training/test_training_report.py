"""Trackers, utilisation and memory of a run, and the report at its end."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState, tracking
from accelerate.tracking import GeneralTracker
from cases import TRAINED, tiny_llama
from covering import few
from peft import get_peft_model
from test_finetune import TARGET, metrics, settings
from torch.utils.flop_counter import FlopCounterMode

import rope_extend.training.run_report as report_module
from rope_extend import RopeExtendError
from rope_extend.data.packing import packed
from rope_extend.loss import NextTokenLoss
from rope_extend.memory.gpus import peak_flops
from rope_extend.plots import training_curves as plots
from rope_extend.report.tables import number
from rope_extend.training.finetune import Recipe, finetune, plan
from rope_extend.training.lora import lora_config
from rope_extend.training.run_report import RunLog, write_training_report
from rope_extend.training.tracking import check_trackers
from rope_extend.training.training_data import check_split
from rope_extend.training.utilisation import (
    device_peak,
    document_spans,
    group_spans,
    training_operations,
)


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(**{**settings(work), "steps": 4, "save_every": 0}, output_dir=str(tmp_path / "run"))


class Recorder(GeneralTracker):
    """A tracker that records what it receives."""

    name = "recorder"
    requires_logging_directory = False
    seen: list[tuple[str, Any, Any]]

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.seen.append(("start", run_name, None))

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(("config", values, None))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.seen.append(("log", values, step))

    def finish(self) -> None:
        self.seen.append(("finish", None, None))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """A tracker that is registered like those of accelerate."""
    Recorder.seen = []
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    return Recorder


def test_every_tracker_gets_every_line(recipe: Recipe, work: Path, recorder: type[Recorder]) -> None:
    recipe = replace(
        recipe, tensorboard=True, trackers=("recorder",), eval_data=str(work / "data"), eval_every=2
    )
    finetune(recipe)
    kinds = [kind for kind, *_ in recorder.seen]
    assert kinds == ["start", "config", *["log"] * 7, "finish"]
    assert recorder.seen[0][1] == "rope_extend"
    assert recorder.seen[1][1]["target_length"] == str(TARGET)
    logged = [(step, values) for kind, values, step in recorder.seen if kind == "log"]
    assert [step for step, _ in logged] == [0, 1, 2, 2, 3, 4, 4]
    for (step, values), line in zip(logged, metrics(recipe.output_dir), strict=True):
        curve = {f"perplexity/{length}": value for length, value in line.pop("perplexity", {}).items()}
        line.pop("eval_data", None)
        assert {"step": step, **values} == line | curve
    assert list(Path(recipe.output_dir, "tensorboard").glob("events.*"))


def test_a_tracker_without_its_package_is_refused_before_anything_is_written(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = next(name for name in ("comet_ml", "clearml", "aim") if importlib.util.find_spec(name) is None)
    with pytest.raises(RopeExtendError, match=rf"tracker {absent} is missing; pip install"):
        finetune(replace(recipe, trackers=(absent,)))
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(RopeExtendError, match=r"tracker tensorboard is missing.*rope_extend\[tensorboard\]"):
        finetune(replace(recipe, tensorboard=True))
    assert not Path(recipe.output_dir).exists()


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", r"rope_extend\[tensorboard\]"), ("wandb", "wandb")]
)
def test_a_missing_tracker_is_named_before_an_accelerator_exists(
    name: str, package: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then accelerate cannot log, and its own check logs."""
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(tracking, "_available_trackers", [])
    message = rf"tracker {name} is missing; pip install '{package}'"
    with pytest.raises(RopeExtendError, match=message):
        check_trackers([name])
    with pytest.raises(RopeExtendError, match=message):
        plan(replace(recipe, trackers=(name,)))
    # Planned for another machine, which may have it.
    assert plan(replace(recipe, trackers=(name,)), limit_memory=10**9, elsewhere=True)


@pytest.mark.slow
def test_a_missing_tracker_is_one_error_at_the_command_line(recipe: Recipe) -> None:
    """In a process of its own, because accelerate looks for packages once, when it is imported."""
    file = Path(recipe.output_dir).with_suffix(".yaml")
    file.write_text(recipe.to_yaml())
    code = (
        "import sys\nsys.modules['tensorboard'] = sys.modules['tensorboardX'] = sys.modules['wandb'] = None\n"
        "from rope_extend.cli.main import main\n"
        "for flags in (['--tensorboard'], ['--trackers', 'wandb'], ['--tensorboard', '--plan']):\n"
        f"    try:\n        main(['finetune', {str(file)!r}, *flags])\n"
        "    except SystemExit as error:\n        print(error.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "2", "2"]
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "tracker" in line]
    assert [re.findall(r"'(.*)'", line) for line in errors] == [
        ["rope_extend[tensorboard]"], ["wandb"], ["rope_extend[tensorboard]"],
    ]  # fmt: skip
    assert not Path(recipe.output_dir).exists()


def test_a_tracker_that_does_not_start_is_one_clear_error(
    recipe: Recipe, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Recorder) -> None:
        raise ConnectionError("no such server")

    monkeypatch.setattr(recorder, "start", fail)
    with pytest.raises(
        RopeExtendError, match=r"tracker recorder does not start: no such server.*leave it out"
    ):
        finetune(replace(recipe, trackers=("recorder",)))


def test_trackers_are_known_by_name() -> None:
    required = {"model": "m", "data": "d", "output_dir": "o", "target_length": 64}
    for given in (["wandb", "tensorboard"], "wandb,tensorboard", ("wandb", "wandb", "tensorboard")):
        assert Recipe(**required, trackers=given).trackers == ("wandb", "tensorboard")
    assert Recipe(**required, tensorboard=True, trackers=["wandb"]).tracked_by == ("tensorboard", "wandb")
    assert Recipe(**required, tensorboard=True, trackers=["tensorboard"]).tracked_by == ("tensorboard",)
    assert Recipe(**required, trackers=[]).tracked_by == ()
    with pytest.raises(RopeExtendError, match=r"trackers must be .*mlflow.*wandb.*; got 'wandbb'"):
        Recipe(**required, trackers=["wandbb"])


WAYS = {
    "attention": {},
    "all-linear": {"lora_targets": "all-linear"},
    "with the head": {"lora_targets": "all-linear", "train_norm_embed": True},
}


@pytest.mark.parametrize("way", few(WAYS, 3, 1))
def test_operations_are_those_that_a_training_step_does(recipe: Recipe, way: str) -> None:
    """Compared with the products that torch counts in a real step with eager attention."""
    model = tiny_llama(tie_word_embeddings=True)
    model.set_attn_implementation("eager")
    peft_model = get_peft_model(model, lora_config(model, replace(recipe, **WAYS[way])))
    for tokens in (32, 96):
        ids = torch.randint(0, 60, (1, tokens))
        with FlopCounterMode(display=False) as counter:
            NextTokenLoss(peft_model)(ids).backward()
        heads = model.config.num_attention_heads * model.config.head_dim
        attention = 3 * 4 * heads * model.config.num_hidden_layers * tokens * tokens
        products = counter.get_total_flops() - attention  # eager attention computes all pairs
        expected, flat = (
            counted.per_token({tokens: 1})
            for quadratic in (True, False)
            if (counted := training_operations(peft_model, quadratic=quadratic))
        )
        causal = 3 * 4 * heads * model.config.num_hidden_layers * (tokens + 1) / 2
        assert expected - flat == pytest.approx(causal)
        # The last token is not scored, and one token more is used to find the size of the vocabulary.
        head = 6 if "train_norm_embed" in WAYS[way] else 4
        flat -= (head - 2) * model.lm_head.weight.numel() / tokens
        if head == 4:  # nothing before the first layer is trained, so its input has no gradient
            inputs = [
                getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj", "v_proj")
            ]
            weights = [(one.base_layer.weight, one.lora_A["default"].weight) for one in inputs]
            flat -= sum(2 * weight.numel() for pair in weights for weight in pair)
        assert flat == pytest.approx(products / tokens, rel=1e-12)


def test_peaks_are_known_by_the_device_names_of_drivers() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989.4e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA A10": 125e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA GH200 480GB": 989.4e12,
    }
    assert {name: peak_flops(name) for name in names} == names
    for unknown in ("Tesla T4", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 D", "cpu"):
        assert peak_flops(unknown) is None, unknown
    assert device_peak(torch.device("cpu"), torch.bfloat16) is None


def test_metrics_have_memory_and_no_utilisation_if_the_peak_is_unknown(recipe: Recipe) -> None:
    finetune(replace(recipe, steps=2))
    lines = metrics(recipe.output_dir)
    assert len(lines) == 2
    assert all("mfu" not in line for line in lines)
    assert all(line["peak_memory_bytes"] > 2**20 for line in lines)


@pytest.mark.slow
def test_utilisation_counts_what_a_step_attends_to(recipe: Recipe, tmp_path: Path) -> None:
    """Short blocks, documents and groups attend to fewer pairs than a long block with as many tokens."""
    seen: dict[str, list[float]] = {}
    ways: dict[str, dict[str, Any]] = {
        "whole": {}, "curriculum": {"curriculum": [[32, 1]]}, "packing": {"packing": "restart"},
        "streaming": {"packing": "restart", "streaming": True}, "groups": {"shifted_sparse": 32},
    }  # fmt: skip
    for name, way in ways.items():
        # So low a peak that the four digits of the metric do not matter.
        run = replace(recipe, steps=2, max_tokens=100, peak_flops=4.0, output_dir=str(tmp_path / name), **way)
        run = run if "packing" in way else replace(run, max_tokens=None)
        result = finetune(run)
        counted = training_operations(result.model)
        assert counted is not None
        seen[name] = [4.0 * line["mfu"] / line["tokens_per_second"] for line in metrics(run.output_dir)]
    whole, short = counted.per_token({TARGET: 1}), counted.per_token({32: 1})
    near = {"rel": 1e-3}  # `tokens_per_second` is rounded
    assert seen["whole"] == pytest.approx([whole, whole], **near)
    assert seen["curriculum"] == pytest.approx([short, whole], **near)
    # 128 tokens in groups of 32; shifted, in three groups and two halves.
    pairs = (4 * 32 * 33 / 2 + 3 * 32 * 33 / 2 + 2 * 16 * 17 / 2) / 2
    ratio = (pairs - 4 * 32 * 33 / 2) / (128 * 129 / 2 - 4 * 32 * 33 / 2)
    assert seen["groups"] == pytest.approx([short + ratio * (whole - short)] * 2, **near)
    for name in ("packing", "streaming"):  # documents of 100 tokens, in blocks of 128
        assert all(counted.per_token({28: 1}) < value < counted.per_token({100: 1}) for value in seen[name])


def test_packed_blocks_are_spans_of_documents() -> None:
    blocks = [
        packed([torch.arange(5), torch.arange(3)]),
        packed([torch.arange(8)]),
        packed([torch.arange(5)]),
    ]
    assert document_spans(blocks) == {5: 2, 3: 1, 8: 1}
    assert group_spans(64, 16) == {16: 3.5, 8: 1.0}


@pytest.fixture(scope="module")
def reported(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evaluations and its report. Tests change only copies of it."""
    directory = tmp_path_factory.mktemp("reported") / "run"
    changes = {"steps": 4, "save_every": 0, "eval_data": str(work / "data"), "eval_every": 2,
               "eval_documents": 1, "peak_flops": 1e10, "output_dir": str(directory)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
        patch.setattr("rope_extend.training.finetune.plan_training", lambda *_, **__: None)
        finetune(Recipe(**{**settings(work), **changes}))
    return directory


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(reported, tmp_path / "run")


def cells(markdown: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_the_report_has_the_measurements(run: Path) -> None:
    assert sorted(path.name for path in (run / "report").iterdir()) == [
        "perplexity.png", "report.html", "report.md", "training.png",
    ]  # fmt: skip
    text = (run / "report" / "report.md").read_text()
    rows = cells(text)
    lines = metrics(run)
    curves = {line["step"]: line["perplexity"] for line in lines if "perplexity" in line}
    assert list(curves) == [0, 2, 4]
    for step, name in ((0, "before training"), (2, "after step 2"), (4, "after step 4")):
        shown = [float(cell.replace(",", "")) for cell in rows[name]]
        assert shown == pytest.approx(list(curves[step].values()), rel=5e-3)
    ratios = [curves[4][length] / curves[0][length] for length in curves[0]]
    assert [float(cell) for cell in rows["ratio, last to first"]] == pytest.approx(ratios, abs=5e-4)
    assert rows["steps"] == ["4"]
    assert rows["tokens"] == [f"{4 * 2 * TARGET:,}"]
    steps = [line for line in lines if "loss" in line]
    assert rows["norm of the gradient, largest"] == [f"{max(line['grad_norm'] for line in steps):.3g}"]
    assert any("MFU" in name for name in rows)
    html = (run / "report" / "report.html").read_text()
    assert html.count('role="img"') == 2
    for shown_in in (text, html):  # by the name of the recipe, because the run lies elsewhere
        assert "rope-extend finetune recipe.yaml --output-dir run-again" in shown_in
        assert str(run) not in shown_in
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert "after step 4" in html
    card = (run / "README.md").read_text()
    assert list(cells(card)["before training, extended"]) == [number(v) for v in curves[0].values()]


@pytest.mark.slow
def test_perplexities_of_different_texts_are_not_compared(recipe: Recipe, work: Path) -> None:
    """A resumed run may be evaluated on other documents; what was measured before does not count then."""
    recipe = replace(
        recipe, data=str(work / "data" / "a.txt"), eval_data=str(work / "data" / "b.txt"), save_every=1
    )
    finetune(replace(recipe, steps=2))
    directory = Path(recipe.output_dir)
    other = replace(recipe, eval_data=str(work / "data" / "c.txt"), eval_every=1)
    result = finetune(replace(other, steps=4), resume=True)
    curves = {line["step"]: line["perplexity"] for line in metrics(directory) if "perplexity" in line}
    assert list(curves) == [0, 2, 3, 4]
    assert {str(length): value for length, value in result.perplexity.items()} == curves[4]
    card = cells((directory / "README.md").read_text())
    assert list(card["after training"]) == [number(value) for value in curves[4].values()]
    assert "before training, extended" not in card
    text = (directory / "report" / "report.md").read_text()
    assert {"after step 3", "after step 4"} <= cells(text).keys()
    assert not {"before training", "after step 2"} & cells(text).keys()
    assert "2 earlier evaluations on other text are left out" in text

    back = finetune(replace(recipe, steps=4), resume=directory / "checkpoints" / "step-3")
    before = cells((back.output_dir / "README.md").read_text())["before training, extended"]
    assert before == [number(value) for value in curves[0].values()]


@pytest.mark.slow
def test_the_same_text_at_other_lengths_is_compared(recipe: Recipe, work: Path) -> None:
    recipe = replace(recipe, data=str(work / "data" / "a.txt"), eval_data=str(work / "data" / "b.txt"))
    first = finetune(replace(recipe, steps=1)).perplexity
    for steps in (1, 2):  # finished, and continued
        result = finetune(replace(recipe, steps=steps, eval_lengths=(40, 64)), resume=True)
        assert set(result.perplexity) == {40, 64}
        rows = cells((result.output_dir / "README.md").read_text())
        curves = {
            line["step"]: line["perplexity"] for line in metrics(result.output_dir) if "perplexity" in line
        }
        assert rows["before training, extended"] == ["–", number(curves[0]["64"])]
        text = (result.output_dir / "report" / "report.md").read_text()
        assert {"before training", "after step 1"} <= cells(text).keys()
        assert "left out" not in text
    again = finetune(replace(recipe, steps=1), resume=result.output_dir / "checkpoints" / "step-1")
    assert first.items() <= again.perplexity.items()


def test_evaluations_on_unrecorded_text_are_not_called_other_text(recipe: Recipe, work: Path) -> None:
    recipe = replace(recipe, data=str(work / "data" / "a.txt"), eval_data=str(work / "data" / "b.txt"))
    directory = Path(finetune(replace(recipe, steps=1)).output_dir)
    lines = metrics(directory)
    for line in lines:
        line.pop("eval_data", None)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = RunLog.read(directory / "metrics.jsonl")
    assert (list(log.curves), log.other_text, log.unrecorded) == ([0, 1], 0, 0)
    finetune(replace(recipe, steps=2), resume=True)
    text = (directory / "report" / "report.md").read_text()
    assert "2 earlier evaluations are left out, because their text was not recorded" in text
    assert "other text" not in text
    card = (directory / "README.md").read_text()
    assert "after training" in cells(card)
    assert "other text" not in card


@pytest.mark.slow
def test_evaluation_on_training_text_is_said(
    recipe: Recipe, work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = work / "data"
    recipe = replace(recipe, steps=1, max_tokens=200, data=(str(data / "a.txt"), str(data / "b.txt")))
    finetune(replace(recipe, eval_data=str(data)))
    assert "2 of the 3 documents of eval_data are also training data" in caplog.text
    run = Path(recipe.output_dir)
    for file in (run / "README.md", run / "report" / "report.md"):
        assert "2 of the documents are also training data, so the text is not held out" in file.read_text()
        assert "on held-out text" not in file.read_text()
    caplog.clear()
    held_out = replace(recipe, eval_data=str(data / "c.txt"), output_dir=str(tmp_path / "held-out"))
    finetune(held_out)
    assert "also training data" not in caplog.text
    assert "on held-out text" in Path(held_out.output_dir, "README.md").read_text()
    stream = replace(recipe, streaming=True, eval_data=recipe.data, output_dir=str(tmp_path / "stream"))
    finetune(stream)
    assert "2 of the 2 documents of eval_data are also training data" in caplog.text


def test_the_split_that_a_run_trains_on_is_no_evaluation(recipe: Recipe) -> None:
    run = replace(recipe, data="owner/name", eval_data="owner/name", eval_split="train")
    with pytest.raises(RopeExtendError, match=r"both use the split 'train'.*Set eval_split to another split"):
        finetune(run)
    check_split(replace(run, eval_split="test"))
    check_split(replace(run, eval_split=None))  # another split is chosen
    parts = replace(run, split="train[:90%]", eval_split="train[90%:]")
    check_split(parts)  # their documents are compared
    for changes in (
        {"eval_split": "train[:100%]"},
        {"eval_data": "owner/name:default"},
        {"split": parts.split, "eval_split": "train"},
    ):
        with pytest.raises(RopeExtendError, match="would be evaluated on its training text"):
            check_split(replace(run, streaming=True, **changes))
    check_split(replace(run, data="owner/name:de", eval_data="owner/name:fr"))
    check_split(replace(run, eval_data="owner/other"))
    check_split(replace(recipe, eval_data=recipe.data))  # files have no splits


def test_a_report_replaces_the_one_before_whole_or_not_at_all(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in (run / "report").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(report_module, "page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_training_report(run, trained_length=TRAINED)
    assert {path.name: path.read_bytes() for path in (run / "report").iterdir()} == before
    (run / "report" / "old.txt").write_text("of an earlier run")
    assert write_training_report(run, trained_length=TRAINED) == run / "report"
    assert sorted(path.name for path in (run / "report").iterdir()) == sorted(before)
    assert not list(run.glob(".report*"))


def test_a_report_that_fails_does_not_fail_the_run(
    recipe: Recipe, work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plots, "plot_training", lambda *_: 1 / 0)
    result = finetune(replace(recipe, eval_data=str(work / "data"), eval_documents=1))
    assert result.steps == 4
    assert "cannot write the training report" in caplog.text
    assert (result.output_dir / "adapter_model.safetensors").exists()
    assert not list(result.output_dir.glob("*report*"))


def test_an_incomplete_log_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RopeExtendError, match="cannot read the metrics"):
        RunLog.read(path)
    path.write_text('{"step": 1, "skipped": 1}\n{"step": 2, "lo')
    with pytest.raises(RopeExtendError, match="no line of a step"):
        RunLog.read(path)
    lines = [{"step": 0, "perplexity": {"32": math.inf}}, {"step": 1, "loss": 2.0}, {"step": 2, "skipped": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    log = RunLog.read(path)
    assert (log.values("loss"), log.curves, log.skipped) == ([2.0], {0: {32: math.inf}}, 1)


def test_the_course_is_drawn_in_every_form(tmp_path: Path) -> None:
    curves = {0: {32: 10.0, 64: 90.0}, 2: {32: 10.0, 64: 30.0}, 4: {32: 10.0, 64: 9.0}}
    for name in ("a.png", "a.svg"):
        plots.plot_course(curves, 32, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert "step 4" in text
    assert "before" in text
    with pytest.raises(RopeExtendError, match="nothing to draw"):
        plots.plot_course({0: {}}, 32, tmp_path / "b.png")
