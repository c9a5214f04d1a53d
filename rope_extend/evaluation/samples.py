"""Samples of text: how a model continues documents, by the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rope_extend.data.documents import Document
from rope_extend.evaluation.answering import answer
from rope_extend.evaluation.prompts import last_tokens
from rope_extend.evaluation.results import EvaluationRow, Sample
from rope_extend.report.tables import Code

NEW_TOKENS = 48
"""Tokens of a continuation; half of the window, if that is less."""
SHOWN_BEFORE = 48
"""Tokens of the prompt's end that a report shows."""


def continuation(
    model: Any, tokenizer: Any, document: Document, length: int, crop: int | None = None
) -> Sample:
    """How a model continues the beginning of a document, so that both fill a window.

    Args:
        model: a causal language model, patched or not.
        tokenizer: its tokenizer.
        document: the document, of two tokens or more.
        length: tokens of the beginning and its continuation.
        crop: number of the last of these tokens that the model sees; None for all.

    Raises:
        RopeExtendError: a window does not fit into memory.
    """
    window = document.input_ids[:length].tolist()
    new = min(NEW_TOKENS, min(len(window), crop or length) // 2)
    ids, written = window[:-new], window[-new:]
    seen = ids if crop is None else last_tokens(ids, crop - new, tokenizer.bos_token_id)
    return Sample(
        Path(document.name).name, len(seen),
        tokenizer.decode(ids[-SHOWN_BEFORE:], skip_special_tokens=True),
        tokenizer.decode(written, skip_special_tokens=True), answer(model, tokenizer, seen, new),
    )  # fmt: skip


def sample_parts(rows: Sequence[EvaluationRow]) -> list[Code]:
    """For each document, its text and how each row continues it."""
    count = max((len(row.samples) for row in rows), default=0)
    return [_part([row for row in rows if len(row.samples) > number], number) for number in range(count)]


def _part(rows: Sequence[EvaluationRow], number: int) -> Code:
    first = rows[0].samples[number]
    most = max(row.samples[number].tokens for row in rows)
    texts = [
        (f"{' '.join(first.document.split())}, the end of the first {most:,} tokens", first.before),
        ("how it goes on", first.written),
    ]
    for row in rows:
        sample = row.samples[number]
        seen = "" if sample.tokens == most else f" (sees {sample.tokens:,} tokens)"
        texts.append((f"{row.label}{seen}", sample.generated))
    body = "\n\n".join(f"=== {head}\n{_shown(text)}" for head, text in texts)
    return Code(f"Sample {number + 1}, continued by each row", body)


def _shown(text: str) -> str:
    """A text without line breaks around it, or that there is none."""
    return text.strip("\n") or ("(only line breaks)" if text else "(nothing)")
