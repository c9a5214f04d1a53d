"""The fitness of a candidate: losses on long documents, and on the answer of a needle near their start."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_extend.data.bundled import random_digits
from rope_extend.data.documents import Document, fingerprint
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_mode import evaluation_mode
from rope_extend.evaluation.loss_computer import LossComputer
from rope_extend.evaluation.perplexity import RunOptions, perplexity
from rope_extend.evaluation.tasks import template_for
from rope_extend.journal import Identity

NEEDLE = "needle"
"""The part of the fitness that is the loss of a needle's answer; the other parts are lengths."""

_DIGITS = {"published": 7, "demo": 5}
_NEEDLES = {
    "published": (
        "\nOne of the special magic numbers for wandering-age is: {}.\n",
        "\nWhat is the special magic number for wandering-age mentioned in the provided text? "
        "The special magic number for wandering-age mentioned in the provided text is: {}",
    ),
    "demo": ("\n# Remember the pass key.\nPASS_KEY = {}\n", "\n# What is the pass key?\nPASS_KEY = {}"),
}
"""The needle and the question of each template; `{}` is the number. The first is LongRoPE2's (2502.20082)."""


class Loss(NamedTuple):
    """A sum of losses in nats, and their number."""

    total: float
    terms: int


Losses = Mapping[str, Loss]
"""The losses of a document, by part of the fitness: a length as text, or `needle`."""


@dataclass(frozen=True)
class NeedleWindow:
    """A document with a needle near its start, and the question at its end.

    Attributes:
        input_ids: int64 `[target length]`; its last tokens are the answer.
        answer: the number of tokens of the answer.
        needle: where the answer's tokens stand in the needle.
    """

    input_ids: Tensor
    answer: int
    needle: slice


def needle_window(
    ids: Tensor, tokenizer: Any, length: int, depth: float, rng: random.Random, template: str
) -> NeedleWindow:
    """Hide a number in a document, and ask for it at the end.

    The needle and the question are tokenised in parts. So the answer has the same tokens in both.

    Args:
        ids: the document, int64 `[T]`, at least `length` tokens.
        tokenizer: the model's tokenizer.
        length: tokens of the window.
        depth: where the needle stands: 0 at the start of the document, 1 before the question.
        rng: source of the number.
        template: `published` or `demo`.

    Raises:
        RopeExtendError: the window is too short for needle and question.
    """

    def encoded(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    needle, question = (text.split("{}") for text in _NEEDLES[template])
    answer = encoded(random_digits(rng, _DIGITS[template]))
    hidden = [encoded(needle[0]), answer, encoded(needle[1])]
    asked = [*encoded(question[0]), *answer]
    room = length - sum(map(len, hidden)) - len(asked)
    if room < 1:
        raise RopeExtendError(
            f"a needle and its question take {length - room} tokens, and the window has {length}; use a "
            "longer target_length, or needle_weight=0"
        )
    at = max(1, round(depth * room))  # not before the first token, which may be BOS
    head, tail = ids[:at].tolist(), ids[at:room].tolist()
    start = at + len(hidden[0])
    values = torch.tensor([*head, *hidden[0], *answer, *hidden[2], *tail, *asked])
    return NeedleWindow(values, len(answer), slice(start, start + len(answer)))


class Fitness:
    """Losses of a model on documents that are numbered: perplexity at several lengths, and needles.

    One forward gives the losses at all lengths, because the tables of candidates do not depend on the length.

    Args:
        documents: the documents, each of at least the longest length.
        lengths: lengths of the perplexity, ascending; empty if it does not count.
        needles: a window with a needle for each document; empty if needles do not count.
        chunk: tokens of a window that are processed at a time, if whole windows do not fit into memory.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        lengths: Sequence[int],
        needles: Sequence[NeedleWindow] = (),
        chunk: int | None = None,
    ) -> None:
        self.documents, self.lengths, self.needles, self.chunk = documents, list(lengths), needles, chunk

    def identity(self) -> Identity:
        """What the losses depend on, besides the model."""
        windows = [Document("needle", window.input_ids) for window in self.needles]
        return {
            "documents": fingerprint(list(self.documents)),
            "needles": fingerprint(windows) if windows else None,
            "lengths": self.lengths,
        }

    @property
    def passes(self) -> int:
        """Forward passes for a document."""
        return bool(self.lengths) + bool(self.needles)

    @property
    def tokens(self) -> int:
        """Forward tokens for a document."""
        return max(self.lengths, default=0) + (len(self.needles[0].input_ids) if self.needles else 0)

    def measure(self, model: nn.Module, numbers: Sequence[int]) -> list[Losses]:
        """The losses of the documents with these numbers, under the model's present tables."""
        losses: list[dict[str, Loss]] = [{} for _ in numbers]
        if self.lengths:
            result = perplexity(
                model,
                [self.documents[number] for number in numbers],
                self.lengths,
                progress=False,
                options=RunOptions(suggested_chunk=self.chunk),
            )
            assert result.document_nll is not None
            assert result.document_terms is not None
            for length in self.lengths:
                sums, terms = result.document_nll[length], result.document_terms[length]
                for row, values in zip(losses, zip(sums, terms, strict=True), strict=True):
                    row[str(length)] = Loss(*values)
        if self.needles:
            for row, number in zip(losses, numbers, strict=True):
                row[NEEDLE] = self._answer(model, self.needles[number])
        return list(losses)

    def _answer(self, model: nn.Module, window: NeedleWindow) -> Loss:
        """The losses of the tokens of a needle's answer; the head runs on these positions only."""
        with evaluation_mode(model) as device, torch.no_grad():
            computer = LossComputer(model, device, suggested_chunk=self.chunk)
            ids = window.input_ids[None].to(device)
            first = ids.shape[1] - window.answer
            losses = computer.losses(ids, ids[:, first:], first, ids.shape[1])
        return Loss(float(losses.double().sum()), window.answer)


def needle_windows(
    documents: Sequence[Document],
    tokenizer: Any,
    length: int,
    depths: Sequence[float],
    *,
    seed: int,
    model: str,
) -> list[NeedleWindow]:
    """A window with a needle for each document; the depths are used in turn.

    Args:
        documents: the documents, each of at least `length` tokens.
        tokenizer: the model's tokenizer.
        length: tokens of each window.
        depths: depths of the needles, 0 … 1.
        seed: seed of the numbers.
        model: name of the model, which sets the form of the needle.

    Raises:
        RopeExtendError: as `needle_window`.
    """
    return [
        needle_window(
            document.input_ids,
            tokenizer,
            length,
            depths[number % len(depths)],
            random.Random(f"{seed}|{number}"),
            template_for(model),
        )
        for number, document in enumerate(documents)
    ]
