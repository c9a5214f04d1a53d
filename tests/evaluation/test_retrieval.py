"""Retrieval by models that always, never or sometimes answer, and by the bundled model."""

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

import rope_extend as rx
from rope_extend.checkpoint.record import read_record, write_record
from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import chunked_forward
from rope_extend.evaluation.answering import answer_batch, generate
from rope_extend.evaluation.asking import Subjects, answer, long_prompt
from rope_extend.evaluation.cells import RETRIEVAL, collect
from rope_extend.evaluation.evaluate import retrieve
from rope_extend.evaluation.evaluation_config import RetrievalConfig
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.prompts import Prompts, depths_from, encode, last_tokens, make_prompts
from rope_extend.evaluation.report_files import markdown_report, read_results
from rope_extend.evaluation.results import RetrievalResult
from rope_extend.evaluation.tasks import ManyShot, Passkey
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.lora import adapted
from rope_extend.training.recipe import Recipe

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
DEMO = Passkey(template="demo")


@pytest.fixture(scope="module")
def bundled() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


class Oracle(LlamaForCausalLM):
    """Answers with the key if it is within the last `sight` tokens of the prompt."""

    def __init__(self, sight: int = 10**9) -> None:
        super().__init__(tiny_llama().config)
        self.sight = sight

    def generate(self, input_ids: Any, stopping_criteria: Any, **kwargs: Any) -> torch.Tensor:
        said = []
        for row in input_ids:
            text = TOKENIZER.decode(row[-self.sight :])
            key = re.search(r"(?:PASS_KEY = |The pass key is )(\d{5})(?=\n|\.)", text)
            said.append(TOKENIZER(f" {key[1]} and" if key else " none at all")["input_ids"][:7])
        width = max(map(len, said))
        new = torch.tensor([one + [0] * (width - len(one)) for one in said])
        for step in range(1, width + 1):
            output = torch.cat([input_ids, new[:, :step]], dim=1)
            if stopping_criteria(output, None).all():
                break
        return output


def measured(model: Any, *, crop: int | None = None, **changes: Any) -> RetrievalResult:
    """The answers to all prompts of a task and length at once, as a row of a report."""
    options: dict[str, Any] = {"depths": (0, 0.5, 1), "trials": 2, **changes}
    options["depths"], options["spread"] = depths_from(options["depths"])
    tasks, lengths = options.pop("tasks", [Passkey()]), options.pop("lengths", [256, 512])
    cells = []
    for task, length in product(tasks, lengths):
        prompts = make_prompts(task, TOKENIZER, length, Prompts(**options))
        trials, peak = answer_batch(model, TOKENIZER, task, prompts, crop)
        cost = {"seconds": 0.0, "forward_tokens": 0, "peak_memory_bytes": peak}
        cells.append({"kind": RETRIEVAL, "label": "model", "trials": trials, "crop": crop, **cost})
    return collect(cells, ["model"])[0].retrieval


def prompt_rows(length: int, **options: Any) -> list[list[int]]:
    options["depths"], options["spread"] = depths_from(options["depths"])
    prompts = make_prompts(DEMO, TOKENIZER, length, Prompts(**options))
    return [encode(TOKENIZER, prompt.text, False) for prompt in prompts]


@pytest.mark.parametrize(("progress", "rank"), [(False, 0), (True, 0), (True, 1)])
def test_the_main_process_shows_progress_as_it_plans_and_writes_prompts(
    progress: bool,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("rope_extend.progress.LINE_EVERY", 0.0)
    caplog.set_level(logging.INFO, "rope_extend")
    config = RetrievalConfig(model=MODEL_DIR, lengths=(256, 512), depths=(0.5,), trials=2)
    Measurement(config, progress=progress)
    printed = capsys.readouterr().err
    for words in ("estimating memory: 2 dry runs", "writing prompts of passkey, 512: 100%"):
        assert (words in printed) == (progress and rank == 0)
    assert any(line.startswith("plan: windows") for line in caplog.messages) == progress  # before all prompts
    with pytest.raises(RopeExtendError, match="256 tokens need about"):  # before any prompt
        Measurement(replace(config, lengths=(256, 1024), limit_memory=5 * 10**7), progress=progress)


@pytest.mark.parametrize("task", [Passkey(), DEMO], ids=["published", "demo"])
def test_an_oracle_solves_all_and_a_mute_model_nothing(task: Passkey) -> None:
    right, wrong = measured(Oracle(), tasks=[task]), measured(Oracle(sight=1), tasks=[task])
    for length in (256, 512):
        assert right.rate("passkey", length).mean == 1
        assert wrong.rate("passkey", length).mean == 0
        assert right.rate("passkey", length).trials == 6
    assert right.depths("passkey") == [0, 0.5, 1]


@pytest.mark.parametrize("crop", [None, 700, 40])
def test_answers_in_place_are_those_of_one_forward(crop: int | None) -> None:
    """The oracle: the logits of stock transformers at the tokens that are in an answer's characters."""
    model = tiny_llama(vocab_size=len(TOKENIZER))
    torch.nn.init.normal_(model.lm_head.weight)
    (prompt,) = make_prompts(
        ManyShot(questions=8), TOKENIZER, 900, Prompts(depths=(0.5,), spread=0, trials=1)
    )
    encoded = TOKENIZER(prompt.text, return_offsets_mapping=True)
    start = 0 if crop is None else len(encoded["input_ids"]) - crop
    ids, spans = encoded["input_ids"][start:], encoded["offset_mapping"][start:]
    with torch.no_grad():
        likely = model.eval()(torch.tensor([ids])).logits[0].argmax(-1)
    expected, end = [], len(prompt.text)
    for each in reversed(prompt.answers):
        begin = prompt.text.rindex(f" {each}", 0, end)
        inside = [n for n, (low, high) in enumerate(spans) if low < end and high > begin + 1]
        expected.append(" ".join(TOKENIZER.decode(likely[[n - 1 for n in inside]]).split()))
        end = prompt.text.rindex("\n", 0, begin)
    if crop == 40:  # too few
        with pytest.raises(RopeExtendError, match=r"8 questions of many_shot need .* sees 40; leave"):
            answer_batch(model, TOKENIZER, ManyShot(questions=8), [prompt], crop)
        return
    trials, _ = answer_batch(model, TOKENIZER, ManyShot(questions=8), [prompt], crop)
    assert trials[0]["response"].split("\n") == expected[::-1]
    assert any(expected)


def test_a_cropped_prompt_is_what_a_short_sighted_model_sees() -> None:
    seen = measured(Oracle(sight=300), lengths=[1000], depths=11)
    cropped = measured(Oracle(), lengths=[1000], depths=11, crop=310)
    assert cropped.cells == seen.cells
    assert 0 < seen.rate("passkey", 1000).mean < 1


def test_cropping_keeps_the_token_that_begins_a_text() -> None:
    (whole,) = prompt_rows(512, depths=1, trials=1)
    assert last_tokens(whole, 246, TOKENIZER.bos_token_id) == [TOKENIZER.bos_token_id, *whole[-245:]]
    assert last_tokens(whole[1:], 246, TOKENIZER.bos_token_id) == whole[-246:]


@pytest.mark.slow
def test_a_batch_says_what_single_rows_say(bundled: PreTrainedModel) -> None:
    """Rows of different lengths, padded on the left, under encodings that do and do not follow the length."""
    rows = [row for length in (128, 256, 300) for row in prompt_rows(length, depths=1, trials=1)]
    for method in ("yarn", "dynamic_yarn"):
        with rx.extend(bundled, 512, method):
            together = generate(bundled, TOKENIZER, rows, 6)
            alone = [generate(bundled, TOKENIZER, [row], 6)[0] for row in rows]
        assert together == alone
        assert len(set(together)) > 1


def test_settings_of_a_checkpoint_neither_fail_nor_change_answers(
    bundled: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache that is filled in chunks, as for long prompts, and for adapters."""
    (row,) = prompt_rows(128, depths=1, trials=1)
    monkeypatch.setattr(chunked_forward, "MAX_WHOLE", 100)
    monkeypatch.setattr(chunked_forward, "MAX_PAIRS", 64 * 131)
    own = bundled.generation_config

    def answers(model: Any) -> list[str]:
        return generate(model, TOKENIZER, [row], 3)

    expected = answers(bundled)
    first = TOKENIZER(expected[0], add_special_tokens=False).input_ids[0]
    settings: dict[str, Any] = {
        "cache_implementation": "static", "guidance_scale": -1.0, "suppress_tokens": [first],
        "num_return_sequences": 2, "repetition_penalty": 5.0, "temperature": 9.0,
    }  # fmt: skip
    lora = get_peft_model(bundled, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2))
    try:
        for name, value in settings.items():
            with monkeypatch.context() as changes:
                changes.setattr(own, name, value)
                assert answers(lora if name == "suppress_tokens" else bundled) == expected, name
                assert bundled.generation_config is own
                assert getattr(own, name) == value
    finally:
        lora.unload()


@pytest.mark.slow
def test_a_run_writes_a_complete_report_with_controls(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    line = ["retrieve", str(MODEL_DIR), "--lengths", "320", "--depths", "0,1", "--trials", "2"]
    line += ["--methods", "yarn", "--output", str(out)]
    main(line)
    table = capsys.readouterr().out
    rows = read_results(out)
    assert [row.label for row in rows] == ["yarn", "none, cropped to 256"]
    assert [row.retrieval.lengths("passkey") for row in rows] == [[256, 320]] * 2
    assert markdown_report(rows).strip() in table
    prompts = [json.loads(text) for text in (out / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 8
    for prompt in prompts:
        tokens = len(encode(TOKENIZER, prompt["text"], prompt["chat"]))
        assert tokens == prompt["tokens"] == prompt["length"] - 10
        assert prompt["text"].endswith("PASS_KEY = ")  # the form that the bundled model knows
    for more, message in (([], "--resume"), (["--resume", "--seed", "1"], "differs in prompts (")):
        with pytest.raises(SystemExit):  # a run is not replaced by mistake, nor resumed with other prompts
            main([*line, *more])
        assert message in capsys.readouterr().err
    main([*line, "--resume"])
    assert [row.retrieval for row in read_results(out)] == [row.retrieval for row in rows]


def test_mistakes_are_found_before_weights_are_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(LoadOptions, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    for wrong, message in (
        ({"methods": ["yarn"], "lengths": [256]}, "within the trained window"),
        ({"tasks": ["multi_key"], "lengths": [64]}, "multi_key needs about"),
        ({"depths": 0}, "depths must be"),
        ({"depths": [0.5, 2]}, "depths must be"),
        ({"data": str(tmp_path / "missing.txt")}, "nothing to read"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            retrieve(RetrievalConfig(model=MODEL_DIR, output=tmp_path / "out", **wrong))
    with pytest.raises(RopeExtendError, match="choose one of them"):
        retrieve(RetrievalConfig(model=MODEL_DIR, output=tmp_path / "out"), resume=True, overwrite=True)
    assert not (tmp_path / "out").exists()


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


def test_the_answer_is_that_of_stock_generate(work: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    ids = tokenizer(TEXT)["input_ids"][:60]
    pieces: list[str] = []
    text = answer(model, tokenizer, ids, 8, pieces.append)
    stock = model.generate(torch.tensor([ids]), max_new_tokens=8, min_new_tokens=0, do_sample=False)
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
    assert prompt.used == prompt.total or len(prompt.ids) == most


def test_prompts_that_cannot_be_written_are_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rx.RopeExtendError, match="no room"):
        long_prompt(tokenizer, TEXT, "why " * 50, 40)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(rx.RopeExtendError, match=r"no system role.*--no-chat"):
        long_prompt(tokenizer, TEXT, "what?", 100)
    assert len(long_prompt(tokenizer, 99 * TEXT, "what?", 100, chat="off").ids) == 100


def test_before_and_after_are_the_base_model_and_the_adapter(work: Path, run: Path, tokenizer: Any) -> None:
    """The adapter answers as `rx.load` does, and the base model as without an adapter."""
    subjects = Subjects.of(str(run), LoadOptions(device="cpu", dtype=torch.float32))
    assert subjects.window == 4 * TRAINED
    ids = tokenizer(TEXT)["input_ids"][: 3 * TRAINED]
    texts = {label: answer(model, tokenizer, ids, 6) for label, model in subjects.models()}
    before, after = texts
    assert before.startswith("before")
    assert after.startswith("after")
    base = AutoModelForCausalLM.from_pretrained(work / "model")
    assert texts[before] == answer(base, tokenizer, ids, 6)
    assert texts[after] == answer(rx.load(run), tokenizer, ids, 6)


def test_the_command(work: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    line = ["generate", str(run), "--file", str(file), "--ask", "what?", "--max-new-tokens", "4"]
    main(line)
    captured = capsys.readouterr()
    assert [part.partition(":")[0] for part in captured.out.split("--- ")[1:]] == ["before", "after"]
    assert "the first " in captured.err  # the text is longer than the window, and that is said
    main([*line, "--no-before"])
    assert "before" not in capsys.readouterr().out
    plain = ["generate", str(work / "model"), "--file", str(file), "--max-new-tokens", "2"]
    main([*plain, "--target-length", "64", "--method", "dynamic_ntk"])
    assert "after: dynamic_ntk" in capsys.readouterr().out
    main(plain)
    assert f"window {TRAINED}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{run} --file {out}/no.txt", "no such file"),
        ("{run} --file {out}/binary.txt", "UTF-8"),
        ("{run} --file {out}/text.txt --max-new-tokens 128", "leaves no room"),
        ("{run} --file {out}/text.txt --target-length 64", "leave --target-length"),
        ("{run} --file {out}/text.txt --trained-length 16", "leave --trained-length"),
        ("{model} --file {out}/text.txt --base-model {model}", "holds no adapter"),
        ("{model} --file {out}/text.txt --no-before", "leave --no-before out"),
        ("{model} --file {out}/text.txt --method yarn", "--target-length"),
        ("{out}/moved --file {out}/text.txt", "cannot find the base model 'gone/base'"),
        ("{out}/moved --file {out}/text.txt", "Give --base-model a"),
        ("{out}/cut --file {out}/text.txt", "adapter_model.safetensors is truncated or damaged"),
        ("{run} --file {out}/text.txt --max-new-tokens 4 --base-model {out}/other", "has other weights"),
        ("{out}/damaged --file {out}/text.txt --max-new-tokens 4", "model.safetensors is truncated"),
        ("{model} --file {out}/text.txt --target-length 16", "16, is within the trained window of 32"),
    ],
)
def test_mistakes(
    work: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text.txt").write_text(TEXT)
    names = {"run": run, "model": work / "model", "out": tmp_path}
    for copy, source in {
        "moved": run,
        "cut": run,
        "damaged": work / "model",
        "other": work / "model",
    }.items():
        shutil.copytree(source, tmp_path / copy)
    write_record(tmp_path / "moved", replace(read_record(run), base_model="gone/base"))
    for weights in (tmp_path / "cut/adapter_model.safetensors", tmp_path / "damaged/model.safetensors"):
        os.truncate(weights, weights.stat().st_size - 8)
    other = AutoModelForCausalLM.from_pretrained(work / "model")
    other.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit) as error:
        main(["generate", *arguments.format(**names).split()])
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""  # not even the first of two answers
