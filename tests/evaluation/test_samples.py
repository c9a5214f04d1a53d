"""Samples of text, and passkeys beyond the trained window, in the report of an evaluation."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_report import row
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.data.documents import Document
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.report_files import read_results, write_report
from rope_extend.evaluation.results import Sample
from rope_extend.evaluation.samples import NEW_TOKENS, continuation, sample_parts
from rope_extend.report.tables import Code

pytestmark = pytest.mark.usefixtures("private_cache")


def argmax(model: Any, ids: list[int], count: int) -> list[int]:
    """Each token by a whole forward, without `generate` and without a cache."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.slow
def test_the_report_shows_passkeys_beyond_the_window_and_continuations(tmp_path: Path) -> None:
    config = EvaluationConfig(
        model=str(MODEL_DIR), data="demo:evaluation", lengths=(256, 384), methods=("none", "yarn"),
        max_documents=1, retrieval=1, retrieval_lengths=(384,), samples=1, output=str(tmp_path / "report"),
    )  # fmt: skip
    rows = {row.label: row for row in rx.evaluate(config, progress=False)}
    assert [row.retrieval.lengths("passkey") for row in rows.values()] == [
        [256, 384], [384], [256, 384],
    ]  # fmt: skip
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        AutoTokenizer.from_pretrained(MODEL_DIR),
    )
    (document,) = rx.load_documents(
        "demo:evaluation", tokenizer, min_tokens=384, max_documents=1, max_tokens=384
    )
    ids = document.input_ids.tolist()[: 384 - NEW_TOKENS]
    written = tokenizer.decode(document.input_ids[384 - NEW_TOKENS : 384], skip_special_tokens=True)
    for label, seen in {"none": ids, "none, cropped to 256": ids[-(256 - NEW_TOKENS) :]}.items():
        (sample,) = rows[label].samples
        expected = argmax(model, seen, 8)
        assert sample.generated.startswith(tokenizer.decode(expected, skip_special_tokens=True)), label
        assert (sample.tokens, sample.written) == (len(seen), written)
    assert rows["yarn"].samples != rows["none"].samples

    (part,) = sample_parts(list(rows.values()))
    table, page = ((tmp_path / "report" / name).read_text("utf-8") for name in ("report.md", "report.html"))
    assert part.text in table
    assert part.heading in page
    assert [row.samples for row in read_results(tmp_path / "report")] == [
        row.samples for row in rows.values()
    ]
    assert str(MODEL_DIR.parent) not in table + page


def test_short_documents_are_continued_from_their_first_half(work: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    samples = [
        continuation(model, tokenizer, Document(str(n), torch.arange(5, 5 + n)), 16) for n in (2, 3, 4)
    ]
    assert [(each.document, each.tokens) for each in samples] == [("2", 1), ("3", 2), ("4", 2)]


def test_names_that_utf8_or_markdown_cannot_hold_cost_no_report(tmp_path: Path) -> None:
    """A byte of a path that is not UTF-8 is shown as a question mark; the row's label keeps it."""
    name = os.fsdecode(b"caf\xe9 <b>*x*</b> `a`\n# b.txt")
    label = os.fsdecode(b"caf\xe9")
    sample = Sample(name, 3, "abc", "\n\n", "")
    rows = [replace(row(label, None, 2.0), samples=(sample,))]
    end = [Code("The command", f"rope-extend evaluate {label}")]
    write_report(rows, tmp_path, end=end)
    table, page = (tmp_path / "report.md").read_text("utf-8"), (tmp_path / "report.html").read_text("utf-8")
    assert "Sample 1, continued by each row:\n\n```\n=== caf? <b>*x*</b> `a` # b.txt, the end of" in table
    assert "=== how it goes on\n(only line breaks)\n\n=== caf?\n(nothing)\n```" in table
    assert "rope-extend evaluate caf?" in table
    assert "rope-extend evaluate caf?" in page
    assert "caf?," in (tmp_path / "table.csv").read_text("utf-8")
    (again,) = read_results(tmp_path)
    assert (again.label, again.samples) == (label, (sample,))


def test_passkeys_beyond_every_length_are_refused(work: Path) -> None:
    settings = {"model": str(work / "model"), "data": str(work / "data"), "methods": ["none", "yarn"]}
    config = EvaluationConfig(**settings, lengths=(64,), retrieval_lengths=(128,))
    with pytest.raises(RopeExtendError, match=r"must be at most the longest of the lengths, 64,"):
        rx.evaluate(config)
    with pytest.raises(RopeExtendError, match="retrieval is 0, so there are no passkeys"):
        EvaluationConfig(**settings, retrieval=0, retrieval_lengths=(64,))
