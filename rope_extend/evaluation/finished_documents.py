"""Losses of finished documents on disk, so that an interrupted measurement can be resumed."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.protocols import Window
from rope_extend.evaluation.results import Losses, write_arrays
from rope_extend.files import write_json
from rope_extend.loss import causal_lm
from rope_extend.patching import current_patch


class FinishedDocuments:
    """A directory with the losses of finished documents, and the key of the measurement they belong to.

    Nothing is written before the first document is finished.

    Args:
        directory: where the files are.
        key: everything that the losses depend on, as plain values of JSON.

    Raises:
        RopeExtendError: the directory holds losses of another measurement.
    """

    def __init__(self, directory: Path, key: dict[str, Any]) -> None:
        self.directory, self.key = directory, json.loads(json.dumps(key))
        path = directory / "measurement.json"
        if not path.exists():
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in {**stored, **self.key} if stored.get(name) != self.key.get(name)]
        if changed:
            raise RopeExtendError(
                f"{str(directory)!r} holds part of another measurement: it differs in {', '.join(changed)} "
                f"({stored.get(changed[0])} there, {self.key.get(changed[0])} here); delete it to start again"
            )

    def read(self, number: int, passes: Sequence[Sequence[Window]]) -> tuple[list[Losses], float] | None:
        """A document's losses by pass, and the seconds they took; None if it is not finished."""
        try:
            with np.load(self._path(number)) as arrays:
                losses = [arrays[f"losses_{n}"] for n in range(len(passes))]
                seconds = float(arrays["seconds"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        sizes = [sum(window.targets for window in windows) for windows in passes]
        return (losses, seconds) if [len(array) for array in losses] == sizes else None

    def write(self, number: int, losses: Sequence[Losses], seconds: float) -> None:
        """Keep a document's losses by pass, float32 `[targets]` each."""
        path = self.directory / "measurement.json"
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(path, self.key)
        arrays = {f"losses_{n}": array for n, array in enumerate(losses)}
        write_arrays(self._path(number), {**arrays, "seconds": np.float64(seconds)})

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:05d}.npz"


def model_identity(model: torch.nn.Module) -> dict[str, Any]:
    """What distinguishes one model from another: its encoding, its dtype, and a norm of each weight."""
    from accelerate.utils import align_module_device

    lm = causal_lm(model)
    patch = current_patch(model)
    norms = []
    for path, module in model.named_modules():
        with align_module_device(module):  # loads weights that are offloaded
            for name, tensor in module.named_parameters(path, recurse=False):
                dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
                values = tensor.detach() if tensor.is_floating_point() else tensor.detach().to(dtype)
                norms.append(f"{name} {float(torch.linalg.vector_norm(values, dtype=dtype)):.5e}")
    return {
        "encoding": patch.encoding.to_dict() if patch else getattr(lm.config, "rope_parameters", None),
        "dtype": str(lm.dtype),
        "weights": hashlib.sha256("\n".join(norms).encode()).hexdigest()[:16],
    }
