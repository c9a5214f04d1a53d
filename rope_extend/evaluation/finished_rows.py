"""The folders of an interrupted evaluation: the row of each, and how much of the row is finished."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rope_extend.checkpoint.manifest import adapter_digests
from rope_extend.evaluation.candidates import Candidates, adapter_labels
from rope_extend.evaluation.evaluation_config import PLAIN
from rope_extend.evaluation.finished_documents import LOSSES_OF_DOCUMENT, MEASUREMENT
from rope_extend.evaluation.results import file_name
from rope_extend.evaluation.retrieval import TRIALS
from rope_extend.units import format_length


@dataclass(frozen=True)
class FinishedRow:
    """What an interrupted evaluation has finished of a row.

    Attributes:
        cropped: whether it is a row whose context is cropped.
        documents: numbers of the finished documents.
        answered: length in tokens of each finished passkey, and its number among those of its depth.
    """

    cropped: bool
    documents: frozenset[int]
    answered: tuple[tuple[int, int], ...]


class RowFolders:
    """The folders of the rows of an evaluation.

    A folder is named after what its row is, because the label of an adapter depends on the other adapters:
    an untrained row by its method, an adapter by its files.

    Args:
        directory: where the folders are.
        candidates: the rows.
    """

    def __init__(self, directory: Path, candidates: Candidates) -> None:
        self.directory, self.candidates = directory, candidates
        self.names = {
            label: _method_name(method, label) for method, label in candidates.method_labels.items()
        }
        for adapter, label in adapter_labels(candidates.records).items():
            self.names[label] = _adapter_name(Path(adapter))

    def folder(self, label: str, *, cropped: bool = False) -> Path:
        """The folder of a row; that of an earlier version of the library, which has the row's label, if any.

        Args:
            label: the row's label, without the words for a cropped context.
            cropped: whether its context is cropped.
        """
        window = format_length(self.candidates.trained_length)
        suffix = f", cropped to {window}" if cropped else ""
        folders = [
            self.directory / file_name(name + suffix) for name in (self.names.get(label, label), label)
        ]
        return next((folder for folder in folders if (folder / MEASUREMENT).exists()), folders[0])

    def others(self, *, cropped: bool) -> list[str]:
        """The folders with losses of rows that are none of these, by name.

        Args:
            cropped: whether rows with a cropped context are measured.
        """
        there = {path.parent for path in self.directory.glob(f"*/{MEASUREMENT}")}
        ours = {self.folder(label) for label in self.names}
        if cropped:
            ours |= {self.folder(label, cropped=True) for label in (PLAIN, *self.names)}
        return sorted(folder.name for folder in there - ours)

    def finished(self, label: str, *, cropped: bool = False) -> FinishedRow:
        """What is finished of a row; the arguments are those of `folder`."""
        folder = self.folder(label, cropped=cropped)
        documents = frozenset(
            int(path.stem) for path in folder.glob(LOSSES_OF_DOCUMENT) if path.stem.isdigit()
        )
        answered = []
        for line in _lines(folder / TRIALS):
            with suppress(ValueError, KeyError, TypeError):  # reading it for the result says what is wrong
                trial = json.loads(line)
                answered.append((int(trial["length"]), int(trial["trial"])))
        return FinishedRow(cropped, documents, tuple(answered))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _method_name(method: str, label: str) -> str:
    """The name of a method; for a saved encoding, whose label depends on the other ones, also its path."""
    return label if label == method else f"{Path(method).name} {_digest(str(Path(method).resolve()))}"


def _adapter_name(adapter: Path) -> str:
    return f"adapter {_digest(json.dumps(adapter_digests(adapter), sort_keys=True))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
