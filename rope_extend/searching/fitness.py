"""The fitness of a candidate: losses on long documents, and on the answer of a needle near their start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_extend.data.documents import Document, fingerprint
from rope_extend.evaluation.loss_computer import LossComputer, RunOptions, evaluation_mode
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.prompts import Task, encode, make_prompt
from rope_extend.evaluation.tasks import Needle, Passkey, template_for
from rope_extend.journal import Identity

NEEDLE = "needle"
"""The part of the fitness that is the loss of a needle's answer; the other parts are lengths."""


class Loss(NamedTuple):
    """A sum of losses in nats, and their number."""

    total: float
    terms: int


Losses = Mapping[str, Loss]
"""The losses of a document, by part of the fitness: a length as text, or `needle`."""


class NeedleWindow(NamedTuple):
    """Tokens `[T]` of a document with a needle, a question at its end, and `answer` tokens of its answer."""

    input_ids: Tensor
    answer: int


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
                options=RunOptions(chunk=self.chunk),
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
            computer = LossComputer(model, device, RunOptions(chunk=self.chunk))
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
    """A prompt with a needle in each document, and the answer; LongRoPE2's needle is RULER's (2502.20082).

    Args:
        documents: the documents, each of at least `length` tokens.
        tokenizer: the model's tokenizer.
        length: the most tokens of a window.
        depths: depths of the needles, 0 … 1, used in turn.
        seed: seed of the numbers.
        model: name of the model; the bundled one gets the passkeys that it was trained on, without documents.

    Raises:
        RopeExtendError: the length is too short for needle and question.
    """
    windows = []
    for number, document in enumerate(documents):
        task: Task = Passkey(template="demo")
        if template_for(model) == "published":
            task = Needle(haystack=(tokenizer.decode(document.input_ids, skip_special_tokens=True),))
        depth = depths[number % len(depths)]
        prompt = make_prompt(task, tokenizer, length, depth, number, seed=seed, chat="off")
        asked = prompt.text.rstrip() + ":" * isinstance(task, Needle)  # as in the needle: "is: 1234567"
        ids = encode(tokenizer, f"{asked} {prompt.answers[0]}", False)
        windows.append(NeedleWindow(torch.tensor(ids), len(ids) - len(encode(tokenizer, asked, False))))
    return windows
