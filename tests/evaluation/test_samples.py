"""Samples of text, and passkeys beyond the trained window, in the report of an evaluation."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_report import row
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import warning_once

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.data.documents import Document
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.answering import answer
from rope_extend.evaluation.candidates import Candidates
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
    said = [part.text, "rope-extend evaluate"]
    table, page = (
        (tmp_path / "report" / name).read_text(encoding="utf-8") for name in ("report.md", "report.html")
    )
    assert all(text in table for text in said)
    assert table.index("| yarn") < table.index(part.heading) < table.index("rope-extend evaluate")
    headings = re.findall(r'<a href="#part-[^>]*>([^<]*)</a>', page)
    charts, tables = ["Perplexity by length", "Loss by position"], ["Perplexity", "Cost"]
    order = ["In short", *charts, *tables, part.heading, "The settings that made this report"]
    assert [heading for heading in headings if heading in order] == order, headings
    assert [row.samples for row in read_results(tmp_path / "report")] == [
        row.samples for row in rows.values()
    ]
    assert str(MODEL_DIR.parent) not in table + page


def test_short_documents_are_continued_from_their_first_half(work: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    documents = [Document(str(n), torch.arange(5, 5 + n)) for n in (1, 0, 2, 3, 4)]
    samples = [continuation(model, tokenizer, each, 16) for each in documents if len(each) > 1]
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
    assert page.count("> caf?</text>") == 2
    (again,) = read_results(tmp_path)
    assert (again.label, again.samples) == (label, (sample,))


def test_passkeys_beyond_every_length_are_refused(work: Path) -> None:
    settings = {"model": str(work / "model"), "data": str(work / "data"), "methods": ["none", "yarn"]}
    config = EvaluationConfig(**settings, lengths=(64,), retrieval_lengths=(128,))
    with pytest.raises(RopeExtendError, match=r"must be at most the longest of the lengths, 64,"):
        rx.evaluate(config)
    with pytest.raises(RopeExtendError, match="retrieval is 0, so there are no passkeys"):
        EvaluationConfig(**settings, retrieval=0, retrieval_lengths=(64,))


def test_answers_are_greedy_and_quiet_whatever_the_checkpoint_says(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    ids = tokenizer("some words that are longer than the window of the model, " * 3)["input_ids"][:60]
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    logger.addHandler(caplog.handler)
    try:
        warning_once.cache_clear()
        model.generate(torch.tensor([ids]), max_new_tokens=2)
        assert "friendly reminder" in caplog.text  # so there is something to be quiet about
        warning_once.cache_clear()
        caplog.clear()
        expected = answer(model, tokenizer, ids, 6)
        first = argmax(model, ids, 1)
        own = model.generation_config
        own.repetition_penalty, own.suppress_tokens, own.temperature = 5.0, first, 9.0
        assert answer(model, tokenizer, ids, 6) == expected
        assert model.generation_config is own
        assert not caplog.text
    finally:
        logger.removeHandler(caplog.handler)
    assert expected == tokenizer.decode(argmax(model, ids, 6), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"init_lora_weights": "pissa"}, r"\(pissa\)"),
        ({"init_lora_weights": "olora"}, r"\(olora\)"),
        ({"bias": "all"}, r'\(bias="all"\)'),
        ({"init_lora_weights": "gaussian"}, None),
    ],
)
def test_adapters_that_change_the_model_itself_are_refused(
    work: Path, tmp_path: Path, options: dict[str, Any], reason: str | None
) -> None:
    """Their row would change the rows that follow, because nothing restores the weights."""
    model = AutoModelForCausalLM.from_pretrained(work / "model", attention_bias=True)
    rx.extend(model, 64, "yarn")
    tuned = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **options)
    )
    adapter = rx.save(tuned, tmp_path / "adapter", base_model=str(work / "model"))
    config = EvaluationConfig(model=str(work / "model"), adapters=(str(adapter),), lengths=(64,))
    if reason is None:
        assert list(Candidates.of(config).records) == [str(adapter)]
    else:
        with pytest.raises(RopeExtendError, match=rf"own weights on loading {reason}.*rope-extend merge"):
            Candidates.of(config)
