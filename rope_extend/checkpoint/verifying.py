"""Verifying: whether a checkpoint reads, in a process that knows nothing of rope_extend, as it reads here."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rope_extend.checkpoint import stock_reader
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.record import Record, library_versions, read_record
from rope_extend.checkpoint.registry import has_stock_form
from rope_extend.checkpoint.saving import load
from rope_extend.checkpoint.tables import beyond_a_table
from rope_extend.encodings import RopeEncoding
from rope_extend.errors import RopeExtendError
from rope_extend.files import write_whole
from rope_extend.inspection import unwrap
from rope_extend.patching import current_patch, patch_model
from rope_extend.pretrained import empty_model

VERIFICATION_NAME = "verification.json"
CONTIGUOUS = 512
"""Tokens of the longest piece; what lies further out is reached by position_ids, not by more tokens."""
PIECE = 64
"""Tokens of the other pieces."""
_ROUNDING = 2.0**-23
"""Relative error of an angle in float32, in which stock tables are computed."""


@dataclass(frozen=True)
class Verification:
    """How a checkpoint reads in a fresh process, against how it reads here.

    Attributes:
        verdict: `equal`; `needs rope_extend`, where stock transformers has no form for the encoding and a
            fresh process with rope_extend reads it as it should; or `differs`.
        reason: one sentence.
        inside: greatest difference of a logit at positions within the pretrained window.
        beyond: the same at positions beyond it; None where none were tried.
        tolerance: how great either may be.
        rounding: where a difference exceeds the tolerance: what angles that are off by float32's rounding
            do to this model's logits at the most, measured in each piece; twice that is allowed there.
        trained_length: the pretrained window, in tokens.
        length: the window that was tried, in tokens.
        pieces: what was tried: for each piece of text, its tokens, and its first and last position.
        versions: of the libraries, in both processes.
        record: SHA-256 of the `rope_extend.json` that this is a verification of.
    """

    verdict: str
    reason: str
    inside: float | None
    beyond: float | None
    tolerance: float
    rounding: float | None
    trained_length: int
    length: int
    pieces: dict[str, tuple[int, int, int]]
    versions: dict[str, str]
    record: str

    @property
    def ok(self) -> bool:
        """Whether the checkpoint reads as it should, if need be through rope_extend."""
        return self.verdict != "differs"

    def check(self) -> Verification:
        """Itself.

        Raises:
            RopeExtendError: the checkpoint reads otherwise than it should.
        """
        if not self.ok:
            raise RopeExtendError(f"verification failed: {self.reason}")
        return self

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON."""
        return asdict(self)


def verify(
    directory: str | PathLike[str],
    *,
    base_model: str | None = None,
    reference: nn.Module | str | PathLike[str] | None = None,
    tolerance: float = 1e-4,
    length: int | None = None,
) -> Verification:
    """Reload a checkpoint in a process without rope_extend, and compare its logits with the patched original.

    On the CPU in float32, at positions inside the pretrained window, around its edge, at the end of the new
    one, and spread over all of it. Writes the verdict to `verification.json` in the directory.

    Args:
        directory: a checkpoint with its record. An adapter is read by rope_extend in the other process, as
            nothing else knows its encoding.
        base_model: of an adapter, where it is not where the record says.
        reference: a patched model, or the directory of one, such as the adapter that was merged; by default
            the checkpoint itself, read by `rope_extend.load`. A merge into bfloat16 is rounded, so that it
            differs from its adapter by more than the tolerance.
        tolerance: on logits. Where it is exceeded, it is measured how far float32's rounding of the angles
            goes in this model, and up to twice that is allowed: stock tables are float32, ours float64.
        length: the window to try, in tokens; by default the recorded target.

    Raises:
        RopeExtendError: no or a damaged checkpoint, a reference that is not patched or another model, or
            the other process could not be run. A checkpoint that reads wrongly is no error but a verdict:
            see `Verification.check`.
    """
    directory = Path(directory)
    record = read_record(directory)
    if not tolerance > 0 or (length is not None and length < 1):
        raise RopeExtendError(f"verify: tolerance {tolerance} and length {length} must be above 0")
    length = length or record.target_length
    model = _reference(directory if reference is None else reference, base_model)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    inputs = pieces(record.shape.trained_length, length, vocabulary)
    expected = _logits(model, inputs)
    floors = _Rounding(model, inputs, expected)
    request = [(directory, base_model)]
    adapter = (directory / "adapter_config.json").exists()
    found, versions = _fresh(request, inputs, plugin=adapter)
    result = _compared(expected, found[0], inputs, record, tolerance, floors)
    verdict, reason = "equal", "stock transformers alone computes the same logits"
    if adapter:
        verdict = "needs rope_extend"
        reason = (
            "an adapter says nothing of its encoding; rope_extend reads it right, others do once it is merged"
        )
    if result.error and adapter:
        verdict, reason = "differs", f"a fresh process with rope_extend: {result.error}"
    elif result.error:
        verdict, reason = "differs", f"stock transformers: {result.error}"
        if not _has_stock_form(directory, record):
            found, versions = _fresh(request, inputs, plugin=True)
            plugin = _compared(expected, found[0], inputs, record, tolerance, floors)
            if plugin.error:
                reason = f"a fresh process with rope_extend: {plugin.error}"
            else:
                verdict = "needs rope_extend"
                reason = (
                    f"stock transformers has no exact form of {record.encoding} ({result.error}); a fresh "
                    "process with rope_extend computes the same logits"
                )
            result = plugin
    verification = Verification(
        verdict,
        reason,
        result.inside,
        result.beyond,
        tolerance,
        floors.greatest,
        record.shape.trained_length,
        length,
        {name: (len(p), int(p.min()), int(p.max())) for name, (_, p) in inputs.items()},
        {**library_versions(), **{f"{name} in the other process": v for name, v in versions.items()}},
        hashlib.sha256((directory / RECORD_NAME).read_bytes()).hexdigest(),
    )
    _write(directory / VERIFICATION_NAME, verification)
    return verification


# ---------------------------------------------------------------------------------------------------------
# What is tried


def pieces(trained_length: int, length: int, vocabulary: int) -> dict[str, tuple[Tensor, Tensor]]:
    """`(token ids [T], positions [T])` of each piece of text that is tried, by name; always the same.

    However long the window, there are a few hundred tokens: positions are given, and far apart in `spread`.
    """
    edge = min(trained_length, length)
    half = PIECE // 2
    spans = {
        "start": torch.arange(min(length, CONTIGUOUS)),
        "edge": torch.arange(max(0, edge - half), min(length, edge + half)),
        "end": torch.arange(max(0, length - PIECE), length),
        "inside": _spread(edge),
        "spread": _spread(length),
    }
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randint(vocabulary, positions.shape, generator=generator), positions)
        for name, positions in spans.items()
    }


def _spread(length: int) -> Tensor:
    """Positions over the whole of a window, first and last included, at uneven distances."""
    steps = torch.linspace(0, 1, min(PIECE, length), dtype=torch.float64)
    return torch.tensor(sorted(set(((length - 1) * steps**1.5).round().long().tolist())))


def _reference(reference: nn.Module | str | PathLike[str], base_model: str | None) -> Any:
    """The patched original on the CPU, in float32, in evaluation mode."""
    if isinstance(reference, nn.Module):
        if current_patch(reference) is None:
            raise RopeExtendError("the reference carries no patch; compare with a model that is extended")
        parameter = next(unwrap(reference).parameters())
        plain = (parameter.dtype, parameter.device.type, reference.training) == (torch.float32, "cpu", False)
        return reference if plain else copy.deepcopy(reference).to("cpu", torch.float32).eval()
    return load(reference, base_model=base_model, dtype=torch.float32).eval()


def _logits(model: Any, inputs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Logits `[T, vocabulary]` of each piece."""
    with torch.inference_mode():
        return {
            name: model(
                input_ids=ids[None],
                position_ids=positions[None],
                # Without a mask, transformers takes positions with gaps for packed texts.
                attention_mask=torch.ones_like(ids[None]),
                use_cache=False,
            ).logits[0].float()
            for name, (ids, positions) in inputs.items()
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# The other process


@contextmanager
def _process_error() -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RopeExtendError(f"the verifying process cannot be run: {error}") from error


def _fresh(
    checkpoints: Sequence[tuple[Path, str | None]],
    inputs: Mapping[str, tuple[Tensor, Tensor]],
    *,
    plugin: bool,
) -> tuple[list[dict[str, Tensor] | str], dict[str, str]]:
    """Logits of checkpoints in a new process, or what it said instead; and its libraries' versions."""
    with _process_error(), TemporaryDirectory(prefix="rope-extend-verify-") as temporary:
        work = Path(temporary)
        tensors = {f"ids.{name}": ids[None].contiguous() for name, (ids, _) in inputs.items()}
        tensors |= {f"positions.{name}": p[None].contiguous() for name, (_, p) in inputs.items()}
        save_file(tensors, work / "inputs")
        request = {
            "plugin": plugin,
            "threads": torch.get_num_threads(),
            "inputs": str(work / "inputs"),
            "answer": str(work / "answer"),
            "checkpoints": [
                {"directory": str(directory.resolve()), "base_model": base, "output": str(work / f"{number}")}
                for number, (directory, base) in enumerate(checkpoints)
            ],
        }
        (work / "request").write_text(json.dumps(request), encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the same libraries as here
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            # -P: the directory of the script, which is this package's, stays off the path.
            [sys.executable, "-P", "-W", "ignore", stock_reader.__file__, str(work / "request")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not (work / "answer").exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RopeExtendError(f"the verifying process ended with {done.returncode}: {last}")
        answer = json.loads((work / "answer").read_text(encoding="utf-8"))
        if not plugin and not answer["without_rope_extend"]:
            raise RopeExtendError("the verifying process imported rope_extend; it verifies nothing")
        found = [
            item["error"] or load_file(work / f"{number}")
            for number, item in enumerate(answer["checkpoints"])
        ]
        return found, answer["versions"]


# ---------------------------------------------------------------------------------------------------------
# What came of it


class _Rounding:
    """What float32's rounding of angles does to a model's logits, by piece; measured if it is asked for.

    With attention as sharp as some models', a last bit of an angle is no small thing, and far out it is
    hundredths of a radian.
    """

    def __init__(
        self, model: Any, inputs: Mapping[str, tuple[Tensor, Tensor]], expected: Mapping[str, Tensor]
    ) -> None:
        self._model, self._inputs, self._expected = model, inputs, expected
        self._floors: dict[str, float] | None = None

    @property
    def greatest(self) -> float | None:
        """Over all pieces; None if nobody asked."""
        return max(self._floors.values()) if self._floors else None

    def __getitem__(self, name: str) -> float:
        if self._floors is None:
            self._floors = dict.fromkeys(self._inputs, 0.0)
            generator = torch.Generator().manual_seed(0)
            for shared in (True, False):  # all positions off alike, and each by itself
                moved = {}
                for each, (ids, positions) in self._inputs.items():
                    signs = 2.0 * torch.randint(2, positions.shape, generator=generator) - 1
                    moved[each] = (ids, positions.double() * (1 + _ROUNDING * (1.0 if shared else signs)))
                for each, found in _logits(self._model, moved).items():
                    gap = float((found - self._expected[each]).abs().max())
                    self._floors[each] = max(gap, self._floors[each])
        return self._floors[name]


@dataclass(frozen=True)
class _Comparison:
    error: str | None
    inside: float | None = None
    beyond: float | None = None


def _compared(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor] | str,
    inputs: Mapping[str, tuple[Tensor, Tensor]],
    record: Record,
    tolerance: float,
    floors: _Rounding,
) -> _Comparison:
    """The greatest differences, and where one is too great."""
    if isinstance(found, str):
        return _Comparison(f"it cannot be loaded ({found.splitlines()[0]})")
    error, worst = None, 1.0
    # Where a length or a position decides which table is read, the least move may change it, and would pass
    # off any difference as rounding.
    one_table = not beyond_a_table(record.encoding, record.shape)
    greatest: dict[bool, float] = {}
    for name, (_, positions) in inputs.items():
        if found[name].shape != expected[name].shape:
            shapes = f"{tuple(found[name].shape)}, not {tuple(expected[name].shape)}"
            return _Comparison(f"its logits are {shapes}")
        gaps = (found[name] - expected[name]).abs().nan_to_num(torch.inf).amax(-1)
        for beyond in (False, True):
            these = gaps[(positions >= record.shape.trained_length) == beyond]
            if len(these):
                greatest[beyond] = max(float(these.max()), greatest.get(beyond, 0.0))
        gap, at = (value.item() for value in gaps.max(0))
        allowed = max(tolerance, 2 * floors[name]) if one_table and gap > tolerance else tolerance
        if gap / allowed > worst:
            worst = gap / allowed
            error = f"a logit is off by {gap:.2g} at position {positions[int(at)]}"
    return _Comparison(error, greatest.get(False), greatest.get(True))


def _has_stock_form(directory: Path, record: Record) -> bool:
    """Whether stock transformers ought to read the recorded encoding exactly in this family."""
    if not isinstance(record.encoding, RopeEncoding) or record.encoding.depends_on_length:
        return False  # what stock has goes by the longest row of a batch
    model = empty_model(str(directory))
    with patch_model(
        model,
        record.encoding,
        trained_length=record.shape.trained_length,
        target_length=record.target_length,
    ):
        return has_stock_form(unwrap(model).config, record.target_length)


def _write(path: Path, verification: Verification) -> None:
    try:
        write_whole(path, json.dumps(verification.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise RopeExtendError(f"cannot write {path}: {error}") from error
