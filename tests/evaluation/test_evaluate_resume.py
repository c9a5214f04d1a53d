"""Interrupted measurements that resume with the same bits, and memory that runs out."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_perplexity import measure, texts, tiny
from transformers import LlamaModel

import rope_extend as rx
from rope_extend.checkpoint.peft_models import tuner_layers
from rope_extend.cli.main import main
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.chunked_forward import TRIAL_CHUNKS
from rope_extend.evaluation.evaluate import evaluation_rows
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.identity import model_identity
from rope_extend.evaluation.perplexity_report import read_results
from rope_extend.journal import differences
from rope_extend.plots.style import Canvas

PROTOCOLS: list[dict[str, Any]] = [
    {},
    {"protocol": "cropped", "window": 16},
    {"protocol": "sliding", "stride": 8},
    {"protocol": "last-k", "last": 8},
]


def numbers(result: rx.PerplexityResult) -> dict[str, Any]:
    """All values of a result except time and memory."""
    values = result.to_dict()
    return {name: values[name] for name in values if name not in ("seconds", "peak_memory_bytes")}


class Stop:
    """Counts forwards, and raises an error in the forward with a given number, once."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.forwards = at, error, 0

    def __call__(self, *_: object) -> None:
        self.forwards += 1
        if self.forwards == self.at:
            raise self.error("stopped by the test")


@pytest.mark.parametrize("options", PROTOCOLS, ids=lambda o: o.get("protocol", "prefix"))
@pytest.mark.parametrize("per_row", [False, True])
def test_an_interrupted_measurement_resumes_with_the_same_bits(
    options: dict[str, Any], per_row: bool, tmp_path: Path
) -> None:
    model, documents = tiny(), texts(70, 65, 90, 80)
    with rx.extend(model, 64, "dynamic_ntk" if per_row else "yarn", **({"per": "row"} if per_row else {})):
        whole = measure(model, documents, [20, 40, 64], save_losses=True, **options)
        count = Stop(0)
        handle = model.model.register_forward_pre_hook(count)
        measure(model, documents[:2], [20, 40, 64], **options)
        handle.remove()
        stop = Stop(count.forwards + 1)  # in the third document
        handle = model.model.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            measure(model, documents, [20, 40, 64], finished=tmp_path / "done", **options)
        assert sorted(path.name for path in (tmp_path / "done").iterdir()) == [
            "00000.npz", "00001.npz", "measurement.json",
        ]  # fmt: skip
        before = stop.forwards
        again = measure(
            model, documents, [20, 40, 64], finished=tmp_path / "done", save_losses=True, **options
        )
        assert stop.forwards - before == count.forwards  # the last two documents only
        handle.remove()
    assert numbers(again) == numbers(whole)
    for length, losses in whole.losses.items():
        for one, other in zip(losses, again.losses[length], strict=True):
            np.testing.assert_array_equal(one, other)


def test_another_measurement_is_not_resumed(tmp_path: Path) -> None:
    model, documents = tiny(), texts(40, 40)
    measure(model, documents, [20, 40], finished=tmp_path)
    handle = model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    assert measure(model, documents, [20, 40], finished=tmp_path).documents == 2
    for arguments, message in (
        ({"lengths": [40]}, r"differ in lengths \(\[20, 40\] there, \[40\] here\)"),
        ({"documents": texts(40, 40)[::-1]}, "differ in data"),
        ({"protocol": "sliding", "stride": 4}, r"differ in protocol \(.*\), stride \(None there, 4 here\)"),
    ):
        given = {"documents": documents, "lengths": [20, 40], "finished": tmp_path, **arguments}
        with pytest.raises(RopeExtendError, match=message):
            measure(model, **given)
    with rx.extend(model, 64, "yarn"), pytest.raises(RopeExtendError, match="differ in encoding"):
        measure(model, documents, [20, 40], finished=tmp_path)
    weight = model.lm_head.weight
    with torch.no_grad():
        for other in (-weight, weight.flip(0), weight + (weight == weight[3, 3]) * 1e-6):
            before = weight.clone()
            weight.copy_(other)
            with pytest.raises(RopeExtendError, match="differ in weights"):
                measure(model, documents, [20, 40], finished=tmp_path)
            weight.copy_(before)
    model.config.rms_norm_eps *= 2
    with pytest.raises(RopeExtendError, match="differ in config"):
        measure(model, documents, [20, 40], finished=tmp_path)
    handle.remove()


def test_documents_stay_finished_when_there_are_more_or_fewer(tmp_path: Path) -> None:
    """Three of five documents are not measured again; then four, of which none is."""
    model, documents = tiny(), texts(40, 41, 42, 43, 44)
    lines: list[int] = []
    handle = model.model.register_forward_pre_hook(lambda *_: lines.append(1))
    measure(model, documents[:3], [40], finished=tmp_path)
    each = len(lines) // 3
    more = measure(model, documents, [40], finished=tmp_path)
    assert len(lines) == 5 * each
    fewer = measure(model, documents[:4], [40], finished=tmp_path)
    assert len(lines) == 5 * each
    assert (more.documents, fewer.documents) == (5, 4)
    assert more.document_nll == measure(model, documents, [40]).document_nll
    handle.remove()
    others = [*documents[:4], *texts(45)]
    with pytest.raises(RopeExtendError, match=r"differ in data \('[0-9a-f]{16}' there"):
        measure(model, others, [40], finished=tmp_path)


def test_another_trained_length_is_not_resumed(tmp_path: Path) -> None:
    """The same encoding, based on another shape, has other tables."""
    model, documents = tiny(), texts(90)
    method = rx.encoding("dynamic_linear")
    with rx.patch_model(model, method, trained_length=32, target_length=96):
        measure(model, documents, [90], finished=tmp_path)
    other = rx.patch_model(model, method, trained_length=64, target_length=96)
    with other, pytest.raises(RopeExtendError, match=r"differ in shape \(.*'trained_length': 32\} there"):
        measure(model, documents, [90], finished=tmp_path)


def test_losses_of_an_unknown_measurement_are_not_resumed(tmp_path: Path) -> None:
    model, documents = tiny(), texts(40, 40)
    measure(model, documents, [40], finished=tmp_path)
    file = tmp_path / "measurement.json"
    for content in ("", "[1]", '{"data": '):
        file.write_text(content)
        with pytest.raises(RopeExtendError, match="do not say which measurement they belong to"):
            measure(model, documents, [40], finished=tmp_path)
    file.unlink()
    with pytest.raises(RopeExtendError, match="do not say which measurement they belong to"):
        measure(model, documents, [40], finished=tmp_path)


def test_an_adapter_that_acts_otherwise_is_another_model() -> None:
    model = get_peft_model(tiny(), LoraConfig(task_type="CAUSAL_LM", lora_alpha=8, target_modules=["q_proj"]))
    identity = model_identity(model)
    with model.disable_adapter():
        assert "adapters" in differences(identity, model_identity(model))
    assert model_identity(model) == identity
    for _, layer in tuner_layers(model):
        layer.scale_layer(2.0)
    assert differences(identity, model_identity(model)).startswith("adapters (")


def test_a_truncated_file_is_measured_again(tmp_path: Path) -> None:
    model, documents = tiny(), texts(40, 40)
    whole = measure(model, documents, [40], finished=tmp_path)
    file = tmp_path / "00001.npz"
    for content in (b"", file.read_bytes()[:-30]):
        file.write_bytes(content)
        assert numbers(measure(model, documents, [40], finished=tmp_path)) == numbers(whole)


class Small:
    """A hook of the first layer that imitates a device with memory for only `fits` tokens at a time."""

    def __init__(self, fits: int, error: Exception) -> None:
        self.fits, self.error, self.sizes = fits, error, []

    def __call__(self, _module: object, states: tuple[torch.Tensor]) -> None:
        size = states[0].shape[:2].numel()
        if size > sum(TRIAL_CHUNKS):
            self.sizes.append(size)
        if size > self.fits:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_if_memory_runs_out_the_document_is_repeated_in_smaller_chunks(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, documents = tiny(), texts(96, 96, 96)
    whole = measure(model, documents, [48, 96])
    small = Small(96, error)
    handle = model.model.layers[0].register_forward_pre_hook(small)
    stop = Stop(2)
    other = model.model.register_forward_pre_hook(stop)  # the second document, once
    with pytest.raises(KeyboardInterrupt):
        measure(model, documents, [48, 96], finished=tmp_path)
    other.remove()
    small.fits, small.sizes = 30, []  # another process uses the rest
    result = measure(model, documents, [48, 96], finished=tmp_path)
    handle.remove()
    # The first document is kept. The second fails whole and in halves. The third starts with what fits.
    assert small.sizes == [96, 48, 24, 24, 24, 24, 24, 24, 24, 24]
    assert caplog.text.count("retrying in chunks of") == 2
    assert "'text1': retrying in chunks of 24 tokens" in caplog.text
    np.testing.assert_allclose(result.nll_by_position, whole.nll_by_position, rtol=1e-5, atol=1e-5)
    assert result.forward_tokens == whole.forward_tokens


@pytest.mark.slow
def test_if_memory_runs_out_batches_get_smaller() -> None:
    model, documents = tiny(), texts(96)
    whole = measure(model, documents, [16], protocol="sliding", stride=4)
    small = Small(16, torch.OutOfMemoryError("CUDA out of memory"))
    handle = model.model.layers[0].register_forward_pre_hook(small)
    result = measure(model, documents, [16], protocol="sliding", stride=4)
    handle.remove()
    assert result.ppl[16] == pytest.approx(whole.ppl[16], rel=1e-5)
    assert [size for size in small.sizes if size > 16] == [320, 160, 80, 32]
    assert small.sizes[-21:] == [16] * 21


@pytest.mark.slow
def test_too_little_memory_is_one_clear_error() -> None:
    model, documents = tiny(), texts(96)
    handle = model.model.layers[0].register_forward_pre_hook(
        Small(0, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    )
    with pytest.raises(
        RopeExtendError, match=r"out of memory on 'text0', even in chunks of .*Tried to allocate"
    ):
        measure(model, documents, [96])
    handle.remove()
    handle = model.model.register_forward_pre_hook(Stop(1, RuntimeError))
    with pytest.raises(RuntimeError, match="stopped by the test"):  # other errors are not caught
        measure(model, documents, [96])
    handle.remove()


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize("at", [2, 5])
def test_the_command_resumes_after_ctrl_c(
    at: int, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three documents, and three rows with the control: interrupted in the first and in the second row."""
    command = f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16,64 --methods none,linear"
    main(shlex.split(f"{command} --output {tmp_path / 'whole'} --save-losses"))
    whole = read_results(tmp_path / "whole")
    assert [row.label for row in whole] == ["none", "none, cropped to 32", "linear"]

    own, stop = LlamaModel.forward, Stop(at)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.norm.weight.is_meta:  # the plan
            stop()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    output = tmp_path / "report"
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(f"{command} --output {output} --save-losses"))
    assert ended.value.code == 130
    assert "--resume continues" in capsys.readouterr().err
    kept = len(list(output.glob("unfinished/*/*.npz")))
    assert kept > 0
    assert not (output / "results.jsonl").exists()
    for again, message in (("", "give --resume to resume it"), ("--resume --overwrite", "not allowed with")):
        with pytest.raises(SystemExit):
            main(shlex.split(f"{command} --output {output} {again}"))
        assert message in capsys.readouterr().err
    main(shlex.split(f"{command} --output {output} --save-losses --resume"))
    assert [numbers(row.result) for row in read_results(output)] == [numbers(row.result) for row in whole]
    assert not (output / "unfinished").exists()
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    for line in lines:
        with np.load(output / line["losses"]) as ours, np.load(tmp_path / "whole" / line["losses"]) as theirs:
            assert ours.files == theirs.files
            for name in ours.files:
                np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_the_command_resumes_while_it_writes_its_report(
    error: type[BaseException],
    work: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16,32 --output {tmp_path}"
    with monkeypatch.context() as patched:
        patched.setattr(Canvas, "save", lambda self: (_ for _ in ()).throw(error))
        with pytest.raises((SystemExit, OSError)):
            main(shlex.split(command))
    assert "the same command with --resume continues" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished"]
    with pytest.raises(SystemExit):
        main(shlex.split(command))
    assert "give --resume to resume it, or --overwrite to replace it" in capsys.readouterr().err
    own = LlamaModel.forward

    def only_planned(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.norm.weight.is_meta
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", only_planned)
    (tmp_path / "table.md").write_text("of a report whose files were not all renamed")
    main(shlex.split(f"{command} --resume"))
    assert len(read_results(tmp_path)) == 1
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.usefixtures("private_cache")
def test_losses_of_rows_that_are_no_longer_asked_for_are_named_before_they_are_deleted(
    work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EvaluationConfig(
        model=str(work / "model"), data=str(work / "data"), lengths=[16, 64], max_documents=1,
        methods=["none", "linear", "ntk"],
    )  # fmt: skip
    unfinished = tmp_path / "unfinished"
    rows = list(evaluation_rows(config, finished=unfinished, progress=False))
    assert len(rows) == 4
    fewer = replace(config, methods=["linear"], cropped=False, output=str(tmp_path))
    assert len(rx.evaluate(fewer, resume=True, progress=False)) == 1
    assert re.search(
        "not measured now: none-[^, ]+, none-cropped-to-32-[^, ]+, ntk-[^, ]+; they", caplog.text
    )
    assert not unfinished.exists()


@pytest.mark.usefixtures("private_cache")
def test_equal_documents_are_measured_once(work: Path, tmp_path: Path) -> None:
    text = next((work / "data").glob("*")).read_text()
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(text)
    config = EvaluationConfig(
        model=str(work / "model"), data=str(tmp_path), lengths=[16], methods=["none"], cropped=False
    )
    (row,) = evaluation_rows(config, progress=False)
    assert row.result.documents == 1


@pytest.mark.usefixtures("private_cache")
def test_the_command_starts_over_on_request(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unfinished" / "odd").mkdir(parents=True)
    command = f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16,32 --output {tmp_path}"
    main(shlex.split(f"{command} --overwrite"))
    assert not (tmp_path / "unfinished").exists()
    with pytest.raises(SystemExit):
        main(shlex.split(f"{command} --resume"))
    assert "already holds" in capsys.readouterr().err


@pytest.mark.usefixtures("private_cache")
def test_a_mistake_costs_no_finished_document_if_overwriting(work: Path, tmp_path: Path) -> None:
    row = tmp_path / "unfinished" / "none"
    row.mkdir(parents=True)
    for name in ("measurement.json", "00000.npz"):
        (row / name).write_text("{}")
    config = EvaluationConfig(
        model=str(work / "model"), data="typo.txt", lengths=(16, 32), output=str(tmp_path)
    )
    with pytest.raises(RopeExtendError, match="typo"):
        rx.evaluate(config, overwrite=True)
    assert sorted(path.name for path in row.iterdir()) == ["00000.npz", "measurement.json"]
