"""Verifying that stock transformers, in a process without rope_extend, computes the same logits as here."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rope_extend.checkpoint import stock_reader
from rope_extend.checkpoint.record import Record, read_record
from rope_extend.checkpoint.restoring import load
from rope_extend.checkpoint.stock_reader import Inputs, logits
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import is_adapter
from rope_extend.models.decoders import unwrap
from rope_extend.models.loading import is_for_stock
from rope_extend.patching import current_patch

CONTIGUOUS = 512
"""Tokens of the longest piece. Later positions are tested through position_ids, not with more tokens."""
PIECE = 64
"""Tokens of the other pieces."""
_ANGLE_ERROR = 2.0**-23
"""Relative rounding error of an angle in float32, the dtype of stock tables."""


@dataclass(frozen=True)
class Verification:
    """The comparison of a checkpoint's logits with those of the patched original.

    Attributes:
        verdict: `equal`; `needs rope_extend`: stock transformers does not support the encoding, and
            rope_extend loads the same logits; or `differs`.
        reason: one sentence.
        inside: largest difference of a logit at positions within the pretrained window.
        beyond: the same at later positions. Each is None if no logits were compared there.
    """

    verdict: str
    reason: str
    inside: float | None = None
    beyond: float | None = None

    def check(self) -> Verification:
        """Return this verification if the logits are right, with or without rope_extend.

        Raises:
            RopeExtendError: the checkpoint computes other logits than the original, or none were compared.
        """
        if self.verdict == DIFFERS:
            raise RopeExtendError(f"verification failed: {self.reason}")
        if self.inside is None and self.beyond is None:
            raise RopeExtendError(f"not verified: {self.reason}")
        return self

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


EQUAL, NEEDED, DIFFERS = "equal", "needs rope_extend", "differs"
"""The verdicts."""


def verify(
    directory: str | PathLike[str],
    *,
    base_model: str | None = None,
    reference: nn.Module | str | PathLike[str] | None = None,
    tolerance: float = 1e-4,
) -> Verification:
    """Reload a checkpoint in a process without rope_extend, and compare its logits with the patched original.

    The comparison runs on the CPU in float32, at positions inside the pretrained window, around its edge, and
    at the end of the extended window.

    Args:
        directory: a checkpoint with its record. An adapter needs rope_extend, so it is loaded here.
        base_model: name or path of an adapter's base model; overrides the one in the record.
        reference: a patched model, or the directory of one, such as the adapter that was merged; default: the
            checkpoint itself, as rope_extend loads it. A merge into bfloat16 is rounded, and differs by more
            than the tolerance.
        tolerance: allowed difference of a logit, or twice the effect of float32's rounding of angles, which
            is measured if needed: stock tables are float32, ours float64.

    Raises:
        RopeExtendError: the checkpoint is missing or damaged; the reference is not patched or another model;
            or the other process cannot be run. Wrong logits are a verdict, not an error: see
            `Verification.check`.
    """
    directory = Path(expand_home(directory))
    record = read_record(directory)
    if not tolerance > 0:
        raise RopeExtendError(f"verify: tolerance must be above 0; got {tolerance}")
    model = _reference(directory if reference is None else reference, base_model)
    if unwrap(model).get_output_embeddings() is None:
        raise RopeExtendError(
            f"verify compares the logits of language models, and {directory} holds a "
            f"{type(unwrap(model)).__name__}; compare its outputs with those before it was saved"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    inputs = pieces(record.shape.trained_length, record.target_length, vocabulary)
    expected = logits(model, inputs)

    def compared(answer: Mapping[str, Tensor] | str, process: str) -> Verification:
        found = _compare(model, record, inputs, expected, answer, tolerance)
        return found if found.verdict == EQUAL else replace(found, reason=f"{process}: {found.reason}")

    why = (
        "an adapter's own files do not state its encoding; rope_extend loads it correctly, and other "
        "libraries do once it is merged"
    )
    if not is_adapter(directory):
        stock = compared(_stock_logits(directory, inputs), "stock transformers")
        # Stock transformers uses the longest row of a batch for an encoding that depends on the length.
        if stock.verdict == EQUAL or (
            not record.encoding.depends_on_length and is_for_stock(directory, record.target_length)
        ):
            return stock
        why = f"{record.encoding} is loaded exactly by rope_extend alone ({stock.reason})"
    if reference is not None:
        again = load(directory, base_model=base_model, dtype=torch.float32).eval()
        found = compared(logits(again, inputs), "rope_extend")
        return found if found.verdict == DIFFERS else replace(found, verdict=NEEDED, reason=why)
    if not all(values.isfinite().all() for values in expected.values()):
        return Verification(DIFFERS, "a logit is not finite")
    advice = "give its original, or what was merged from it, as reference= (--reference)"
    return Verification(NEEDED, f"{why}. Nothing was compared: {advice}")


def pieces(trained_length: int, length: int, vocabulary: int) -> Inputs:
    """Token ids and positions `[2, T]` of each tested piece of text, by name; the same in every call.

    A window of any length needs only a few hundred tokens, because the positions are passed explicitly.
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
        name: torch.stack([torch.randint(vocabulary, positions.shape, generator=generator), positions])
        for name, positions in spans.items()
    }


def _spread(length: int) -> Tensor:
    """Positions over a whole window, first and last included, at uneven distances."""
    steps = torch.linspace(0, 1, min(PIECE, length), dtype=torch.float64)
    return torch.tensor(sorted(set(((length - 1) * steps**1.5).round().long().tolist())))


def _reference(reference: nn.Module | str | PathLike[str], base_model: str | None) -> Any:
    """The patched original on the CPU, in float32, in evaluation mode."""
    if isinstance(reference, nn.Module):
        if current_patch(reference) is None:
            raise RopeExtendError("the reference carries no patch; compare with an extended model")
        parameter = next(unwrap(reference).parameters())
        ready = (parameter.dtype, parameter.device.type, reference.training) == (torch.float32, "cpu", False)
        return reference if ready else copy.deepcopy(reference).to("cpu", torch.float32).eval()
    return load(reference, base_model=base_model, dtype=torch.float32).eval()


def _stock_logits(directory: Path, inputs: Inputs) -> dict[str, Tensor] | str:
    """Logits of a checkpoint in a new process without rope_extend, or its error message."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the same libraries as here
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        with TemporaryDirectory(prefix="rope-extend-verify-") as name:
            work = Path(name)
            save_file(dict(inputs), work / "inputs")
            # -P: the directory of the script belongs to this package and stays off the path.
            command = [sys.executable, "-P", "-W", "ignore", stock_reader.__file__, str(directory.resolve())]
            command += [name, str(torch.get_num_threads())]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if (work / "error").exists():
                return (work / "error").read_text(encoding="utf-8")
            if done.returncode or not (work / "logits").exists():
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise RopeExtendError(f"the verifying process ended with {done.returncode}: {last}")
            return load_file(work / "logits")
    except (OSError, SafetensorError) as error:
        raise RopeExtendError(f"the verifying process cannot be run: {error}") from error


def _compare(
    model: Any,
    record: Record,
    inputs: Inputs,
    expected: Mapping[str, Tensor],
    answer: Mapping[str, Tensor] | str,
    tolerance: float,
) -> Verification:
    """Compare logits, or the error message of another process, with those of the patched original."""
    if isinstance(answer, str):
        return Verification(DIFFERS, f"it cannot be loaded ({answer.splitlines()[0]})")
    for name in inputs:
        if (found := tuple(answer[name].shape)) != (wanted := tuple(expected[name].shape)):
            return Verification(DIFFERS, f"its logits have shape {found}, not {wanted}")
    positions = torch.cat([where for _, where in inputs.values()])
    gaps = torch.cat(
        [(answer[name] - expected[name]).abs().nan_to_num(torch.inf).amax(-1) for name in inputs]
    )
    allowed = torch.full_like(gaps, tolerance)
    # Where a change of a position may select another table, any difference would pass.
    if bool((gaps > tolerance).any()) and not record.encoding.why_not_one_table(record.shape):
        # Logits that are not finite have no rounding, and allow no more than the tolerance.
        rounding = _rounding(model, inputs, expected).nan_to_num(0.0, posinf=0.0)
        allowed = allowed.maximum(2 * rounding)
    worst = int((gaps / allowed).argmax())
    error = ""
    if gaps[worst] > allowed[worst]:
        error = f"a logit is off by {gaps[worst]:.2g} at position {positions[worst]}"
    beyond = positions >= record.shape.trained_length
    inside, outside = (float(these.max()) if len(these) else None for these in (gaps[~beyond], gaps[beyond]))
    reason = error or "stock transformers alone computes the same logits"
    return Verification(DIFFERS if error else EQUAL, reason, inside, outside)


def _rounding(model: Any, inputs: Inputs, expected: Mapping[str, Tensor]) -> Tensor:
    """The largest change of a logit when all angles change by float32's rounding error, in each piece.

    In models with sharp attention, the last bit of an angle matters. At far positions it is hundredths of a
    radian. The result has the value of its piece for each token of all pieces.
    """
    found = dict.fromkeys(inputs, 0.0)
    generator = torch.Generator().manual_seed(0)
    for shared in (True, False):  # the same error at all positions, then one for each
        moved = {}
        for name, (ids, positions) in inputs.items():
            signs = 1.0 if shared else 2.0 * torch.randint(2, positions.shape, generator=generator) - 1
            moved[name] = torch.stack([ids.double(), positions.double() * (1 + _ANGLE_ERROR * signs)])
        for name, moved_logits in logits(model, moved).items():
            found[name] = max(float((moved_logits - expected[name]).abs().max()), found[name])
    return torch.cat([torch.full((len(expected[name]),), found[name]) for name in inputs])
