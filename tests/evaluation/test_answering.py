"""Questions about a long text: the answer is stock transformers' own, prompts fit, and mistakes are clear."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import warning_once

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.evaluation.answering import Subjects, answer, long_prompt
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.lora import adapted
from rope_extend.training.recipe import Recipe

TEXT = " ".join(f"line {index} says {index * 7 % 13}." for index in range(60))
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer(work: Path) -> Any:
    return AutoTokenizer.from_pretrained(work / "model")


@pytest.fixture(scope="module")
def run(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with its record, whose LoRA matrices are not zero."""
    directory = tmp_path_factory.mktemp("run") / "yarn"
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    rx.extend(model, 4 * TRAINED, "yarn")
    recipe = Recipe(
        model=str(work / "model"), data="x", output_dir="y", target_length=4 * TRAINED, lora_rank=2
    )
    adapter = adapted(model, recipe)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    rx.save(adapter, directory, base_model=str(work / "model"))
    return directory


def test_the_answer_is_that_of_stock_generate_and_quiet(
    work: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    ids = tokenizer(TEXT)["input_ids"][:60]
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    warning_once.cache_clear()
    pieces: list[str] = []
    text = answer(model, tokenizer, ids, 8, pieces.append)
    assert not caplog.text
    warning_once.cache_clear()
    stock = model.generate(torch.tensor([ids]), max_new_tokens=8, min_new_tokens=0, do_sample=False)
    assert "friendly reminder" in caplog.text  # so there is something to be quiet about
    assert text == tokenizer.decode(stock[0, len(ids) :], skip_special_tokens=True)
    assert "".join(pieces).strip() == text.strip()


@pytest.mark.parametrize("question", ["what?", None])
@pytest.mark.parametrize("chat", [False, True])
@settings(max_examples=15)
@given(most=st.integers(60, 900))
def test_a_prompt_fits_and_keeps_the_question(
    tokenizer: Any, question: str | None, chat: bool, most: int
) -> None:
    tokenizer.chat_template = TEMPLATE if chat else None
    try:
        prompt = long_prompt(tokenizer, TEXT, question, most)
    finally:
        tokenizer.chat_template = None
    assert len(prompt.ids) <= most
    assert prompt.total == len(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    # The tokenizer of the tests has no decoder: its tokens are bytes, with `Ġ` for a space.
    written = "".join(tokenizer.convert_ids_to_tokens(prompt.ids)).replace("Ġ", " ")
    assert "line 0 says 0" in written
    if question:
        assert question in written
        assert ("<assistant>" in written) == chat
    assert (prompt.used < prompt.total) == (f"line 59 says {59 * 7 % 13}." not in written)
    assert prompt.used == prompt.total or len(prompt.ids) > most - 12  # few tokens stay free


def test_prompts_that_cannot_be_written_are_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rx.RopeExtendError, match="no room"):
        long_prompt(tokenizer, TEXT, "why " * 50, 40)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(rx.RopeExtendError, match=r"no system role.*--no-chat"):
        long_prompt(tokenizer, TEXT, "what?", 100)
    assert long_prompt(tokenizer, TEXT, "what?", 100, chat="off").ids


def test_before_and_after_are_the_base_model_and_the_adapter(work: Path, run: Path, tokenizer: Any) -> None:
    """The adapter answers as `rx.load` does, and the base model as without an adapter."""
    subjects = Subjects.of(str(run), LoadOptions(device="cpu", dtype=torch.float32))
    assert subjects.window == 4 * TRAINED
    ids = tokenizer(TEXT)["input_ids"][: 3 * TRAINED]
    texts = {label: answer(model, tokenizer, ids, 6) for label, model in subjects.answerers()}
    before, after = texts
    assert before.startswith("before")
    assert after.startswith("after")
    base = AutoModelForCausalLM.from_pretrained(work / "model")
    assert texts[before] == answer(base, tokenizer, ids, 6)
    assert texts[after] == answer(rx.load(run), tokenizer, ids, 6)


def test_the_command(work: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    line = ["generate", str(run), "--file", str(file), "--ask", "what?", "--new-tokens", "4"]
    main(line)
    captured = capsys.readouterr()
    assert [part.partition(":")[0] for part in captured.out.split("--- ")[1:]] == ["before", "after"]
    assert "the first " in captured.err  # the text is longer than the window, and that is said
    main([*line, "--no-before"])
    assert "before" not in capsys.readouterr().out
    plain = ["generate", str(work / "model"), "--file", str(file), "--new-tokens", "2"]
    main([*plain, "--target-length", "64", "--method", "dynamic_ntk"])
    assert "after: dynamic_ntk" in capsys.readouterr().out
    main(plain)
    assert f"window {TRAINED}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{run} --file {out}/no.txt", "no such file"),
        ("{run} --file {out}/empty.txt", "is empty"),
        ("{run} --file {out}/binary.txt", "UTF-8"),
        ("{run} --file {out}/text.txt --new-tokens 128", "leaves no room"),
        ("{run} --file {out}/text.txt --target-length 64", "leave --target-length"),
        ("{run} --file {out}/text.txt --trained-length 16", "leave --trained-length 16 out"),
        ("{model} --file {out}/text.txt --base-model {model}", "holds no adapter"),
        ("{model} --file {out}/text.txt --no-before", "leave --no-before out"),
        ("{model} --file {out}/text.txt --method yarn", "--target-length"),
        ("{model} --file {out}/text.txt --target-length 16", "16, is within the trained window of 32"),
    ],
)
def test_mistakes(
    work: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text.txt").write_text(TEXT)
    names = {"run": run, "model": work / "model", "out": tmp_path}
    with pytest.raises(SystemExit) as error:
        main(["generate", *arguments.format(**names).split()])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
