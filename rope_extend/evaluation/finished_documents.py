"""Losses of finished documents on disk, so that an interrupted measurement can be resumed."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rope_extend.evaluation.identity import read_identity
from rope_extend.evaluation.protocols import Window
from rope_extend.evaluation.results import Losses, write_arrays
from rope_extend.files import write_json
from rope_extend.journal import Identity, check_same

MEASUREMENT = "measurement.json"
"""File of the identity of the measurement that the losses belong to."""

EXTENT = "extent.json"
"""File of what an evaluation with a budget measures, next to the folders of the rows."""

LOSSES_OF_DOCUMENT = "[0-9][0-9][0-9][0-9][0-9]*.npz"
"""Pattern of the files of losses, one for each document."""


class FinishedDocuments:
    """A directory with the losses of finished documents, and the identity of the measurement.

    Nothing is written before the first document is finished. A measurement of more or fewer documents uses
    those that it shares with the earlier one, if these are the first ones of both.

    Args:
        directory: where the files are.
        identity: everything that the losses depend on; `data` is the fingerprint of each document.

    Raises:
        RopeExtendError: the directory holds losses of another measurement, or of an unknown one.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        self.directory, self.identity = directory, identity
        path = directory / MEASUREMENT
        self.is_known = path.exists()
        if self.is_known or any(directory.glob(LOSSES_OF_DOCUMENT)):
            stored, shared = read_identity(path), identity
            documents = identity.get("data", [])
            if isinstance(stored, dict) and isinstance(there := stored.get("data"), list):
                self.is_known = len(there) >= len(documents)
                count = min(len(there), len(documents))
                stored, shared = _with_documents(stored, count), _with_documents(identity, count)
            check_same(
                stored,
                shared,
                what=f"{str(directory)!r} holds losses",
                advice="use another directory, or delete this one to start again",
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
        if not self.is_known:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self.directory / MEASUREMENT, self.identity)
            self.is_known = True
        arrays = {f"losses_{n}": array for n, array in enumerate(losses)}
        write_arrays(self._path(number), {**arrays, "seconds": np.float64(seconds)})

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:05d}.npz"


def _with_documents(identity: Identity, count: int) -> Identity:
    """An identity with one digest for its first documents."""
    digest = hashlib.sha256(json.dumps(identity["data"][:count]).encode()).hexdigest()
    return {**identity, "data": digest[:16]}
