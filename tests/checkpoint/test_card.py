"""The card agrees with the record, and all code on it runs and loads the encoding."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import TARGET, TRAINED, llama
from covering import few
from integrity import each, logits, tuned
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint import card as card_module
from rope_extend.checkpoint.card import add_card, model_card, write_card
from rope_extend.checkpoint.record import read_record, write_record
from rope_extend.cli.main import main, parse
from rope_extend.evaluation.report_files import write_report
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.models.checkpoint_directory import CARD_NAME

METHODS = ("yarn", "linear", "ntk", "ntk_by_parts", "clipped", "dynamic_ntk", "xpos")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(params=few(METHODS, 3))
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`base` and `run` (an adapter) in the working directory."""
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained("base")
    return rx.save(tuned("base", request.param), "run")


def test_python_lines_run_as_they_stand_and_read_with_the_encoding(run: Path) -> None:
    expected = logits(rx.load(run))
    write_card(run)
    rx.merge(run, "merged")  # this also writes the card
    plain = logits(AutoModelForCausalLM.from_pretrained("base"))
    assert not torch.allclose(expected, plain, atol=1e-2)
    for directory, count in ((run, 1), (Path("merged"), 1)):
        text = (directory / CARD_NAME).read_text()
        code = blocks(text, "python")
        assert len(code) == count
        for lines in code:
            scope: dict[str, Any] = {}
            exec(compile(lines, CARD_NAME, "exec"), scope)
            assert_same_but_rounding(logits(scope["model"]), expected)


def test_our_commands_parse_and_run(run: Path) -> None:
    write_card(run)
    main(shlex.split(blocks((run / CARD_NAME).read_text(), "bash")[0].splitlines()[0])[1:])
    assert (Path("run-merged") / "config.json").exists()
    for directory in (run, Path("run-merged")):
        for block in blocks((directory / CARD_NAME).read_text(), "bash"):
            for line in block.splitlines():
                parse(shlex.split(line)[1:])


@pytest.mark.parametrize("run", ["yarn"], indirect=True)
def test_an_export_has_a_card_of_its_own_or_that_which_somebody_wrote(run: Path) -> None:
    """It keeps what its source's card says of the training and of what was measured."""
    rx.merge(run, "merged")
    write_card("merged", data="books", results="| 128 | 7.77 |")
    rx.export("merged", "out", "vllm", verify=False)
    text = Path("out", CARD_NAME).read_text()
    assert "\n# out\n" in text
    assert {"| data | `books` |", "| 128 | 7.77 |"} <= set(text.splitlines())
    assert "been measured" not in text
    assert not re.search(r"\bmerged\b", text)
    Path("merged", CARD_NAME).write_text("mine")
    rx.export("merged", "out2", verify=False)
    assert Path("out2", CARD_NAME).read_text() == "mine"


@pytest.mark.parametrize("run", ["yarn"], indirect=True)
def test_front_matter_names_a_base_of_the_hub_and_no_license(run: Path) -> None:
    def front() -> dict[str, Any]:
        return yaml.safe_load(model_card(run).split("---\n")[1])

    assert front() == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["rope_extend", "long-context", "yarn", "lora"],
    }
    write_record(run, replace(read_record(run), base_model="some-org/Model-7B"))
    assert front()["base_model"] == "some-org/Model-7B"
    text = model_card(run)
    for fact in (
        "`some-org/Model-7B`",
        "arXiv 2309.00071",
        f"{TRAINED} tokens",
        f"{TARGET} tokens, 8×",
        '"factor": 8.0',
    ):
        assert fact in text


@pytest.fixture
def results(tmp_path: Path) -> Path:
    result = rx.PerplexityResult(
        ppl={32: 9.5, TARGET: 4.25}, tokens={32: 62, TARGET: 510},
        protocol="prefix", window=None, documents=2, data="abc", passes=1,
        forward_tokens=512, seconds=1.0, peak_memory_bytes=1,
    )  # fmt: skip
    row = EvaluationRow("yarn + LoRA", {"name": "yarn", "factor": 8.0}, "base", "run", result, TRAINED)
    write_report([row], tmp_path / "report")
    return tmp_path / "report"


@pytest.mark.slow
@pytest.mark.parametrize("run", ["yarn"], indirect=True)
def test_results_bring_the_table_and_the_picture(run: Path, results: Path) -> None:
    assert "Not measured yet" in model_card(run)
    measured = str(results / "results.jsonl")
    main(["card", str(run), "--results", measured, "--data", "books", "--name", "org/name"])
    text = (run / CARD_NAME).read_text()
    assert "| yarn + LoRA | " in text
    assert "4.25" in text
    assert "| data | `books` |" in text
    assert 'rx.load("org/name")' in text
    assert "![Perplexity against length](perplexity.png)" in text
    assert (run / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert "has not been measured" not in text
    assert "After training" in model_card(run, perplexity={32: 9.5, 256: 4.0})


@pytest.mark.parametrize("run", ["yarn"], indirect=True)
def test_what_somebody_wrote_stays(run: Path) -> None:
    assert write_card(run) == run / CARD_NAME
    assert write_card(run, data="books") == run / CARD_NAME  # our own card is replaced
    text = (run / CARD_NAME).read_text()
    for theirs in ("mine", text.replace("# run", "# My model"), text + "\nlicense: mit\n"):
        (run / CARD_NAME).write_text(theirs)
        assert write_card(run) is None
        assert (run / CARD_NAME).read_text() == theirs
    with pytest.raises(SystemExit):
        main(["card", str(run)])


@pytest.mark.parametrize("run", ["yarn"], indirect=True)
def test_a_picture_that_somebody_else_made_stays(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture, card = run / "perplexity.png", run / CARD_NAME
    picture.write_text("mine")
    write_card(run, results="| table |", draw=lambda path: path.write_text("ours"))
    assert picture.read_text() == "mine"
    assert "| table |" in card.read_text()
    assert "perplexity.png" not in card.read_text()
    assert "perplexity.png is not replaced" in caplog.text
    picture.unlink()
    for drawn in ("ours", "ours again"):
        write_card(run, results="| table |", draw=lambda path, text=drawn: path.write_text(text))
        assert picture.read_text() == drawn
        assert "(perplexity.png)" in card.read_text()


@pytest.mark.usefixtures("private_cache")
def test_fine_tuning_writes_the_card(work: Path, tmp_path: Path) -> None:
    data = str(work / "data" / "a.txt")
    recipe = rx.Recipe(
        model=str(work / "model"), data=data, output_dir=str(tmp_path / "run"),
        target_length=64, steps=1, lora_rank=2, eval_data=str(work / "data" / "b.txt"),
    )  # fmt: skip
    rx.finetune(recipe)
    text = (tmp_path / "run" / CARD_NAME).read_text()
    assert "| data | `a.txt` (a local path) |" in text
    facts = "steps 1, batch_size 1, gradient_accumulation 8, learning_rate 0.0002, lora_rank 2"
    assert f"| training | {facts} |" in text
    assert "After training, on held-out text" in text
    rx.merge(tmp_path / "run", tmp_path / "merged")
    write_card(tmp_path / "merged", results="| 128 | 7.77 |")
    text = (tmp_path / "merged" / CARD_NAME).read_text()
    assert f"| data | `a.txt` (a local path) |\n| training | {facts} |\n" in text
    for directory in ("run", "merged"):
        assert str(work) not in (tmp_path / directory / CARD_NAME).read_text()


@each("adapter")
def test_a_card_has_no_absolute_paths(directory: Path, checkpoints: Path, tmp_path: Path) -> None:
    """People publish the card: it names the last part of a local path, and says that it is one."""
    for data in (
        str(tmp_path / "secret" / "corpus"),
        ["~/secret/corpus", "owner/name"],
        "C:\\secret\\corpus",
        "../secret/corpus",
    ):
        full = {"lora_targets": "none", "lora_rank": 16, "mixed_windows": True, "short_share": 0.5}
        (directory / "recipe.yaml").write_text(yaml.safe_dump({"data": data, **full}))
        text = model_card(directory)
        assert "| training | mixed_windows True, short_share 0.5 |" in text
        assert "secret" not in text
        assert checkpoints.name not in text
        assert str(tmp_path) not in text
        assert "| data | `corpus` (a local path)" in text
        assert ("`owner/name`" in text) == isinstance(data, list)
    assert "| base model | `base` (a local path) |" in text


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)
"""69 billion items, in a file of 600 bytes."""


@each("adapter")
@pytest.mark.parametrize(
    "recipe",
    few([
        "data: 5", "data: [[a]]", "steps: [1]", "block_length: {}", "[1, 2]", "x", "", "\0",
        "a: " + "[" * 20_000, f"{ALIASES}data: *a11", f"{ALIASES}steps: *a11",
    ], 3),
)  # fmt: skip
def test_a_recipe_of_another_form_is_left_out_of_the_card(directory: Path, recipe: str) -> None:
    (directory / "recipe.yaml").write_text(recipe)
    text = model_card(directory)
    assert "| data | not recorded |" in text
    assert len(text) < 10_000


@each("adapter")
def test_an_unforeseen_error_in_a_card_does_not_end_the_work(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(card_module, "model_card", lambda *_, **__: {}["missing"])
    add_card(directory)
    assert "no model card: KeyError('missing')" in caplog.text
