"""lm-evaluation-harness on extended models: the numbers of our own evaluator, and of naive loops."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import few
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.evaluation import chunked_forward

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
from lm_eval.api.instance import Instance

from rope_extend.evaluation.harness import ExtendedLM, _line_break

TASK = """
task: {name}
dataset_path: text
dataset_kwargs: {{data_files: {{test: "{text}"}}, sample_by: document}}
test_split: test
output_type: {kind}
doc_to_text: {prompt}
doc_to_target: {target}
metric_list: [{{metric: {metric}}}]
generation_kwargs: {{until: ["\\n\\n\\n\\n"], max_gen_toks: 4, do_sample: false}}
"""
WINDOW = 512


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the bundled model for twice its window, that changes what it computes."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    rx.extend(model, WINDOW, "yarn")
    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return rx.save(tuned, tmp_path_factory.mktemp("adapter"), overwrite=True)


def naive(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood in float64 from one forward over the last tokens of the window."""
    ids = torch.tensor([*context, *continuation])[-WINDOW - 1 :]
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0, -len(continuation) :].double()
    likely = torch.equal(logits.argmax(-1), ids[-len(continuation) :])
    return logits.log_softmax(-1).gather(1, ids[-len(continuation) :, None]).sum().item(), likely


@pytest.mark.parametrize("chunk", [None, 100])
def test_a_continuation_has_the_likelihood_of_a_naive_forward(
    chunk: int | None, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, model, tokenizer = (
        ExtendedLM(str(adapter)),
        rx.load(adapter),
        AutoTokenizer.from_pretrained(MODEL_DIR),
    )
    assert lm.max_length == WINDOW
    text = Path(json.__file__).read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    rows: list[int] = []
    lm.model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: rows.append(given[0].shape[1])
    )
    if chunk is not None:
        monkeypatch.setattr(chunked_forward, "MAX_WHOLE", chunk)
        monkeypatch.setattr(chunked_forward.ChunkedForward, "default_chunk", lambda *_: chunk)
    with torch.no_grad():
        best = model(torch.tensor([ids[:60]])).logits[0, -1].argmax().item()
    requests = [
        (("", ""), context, continuation)
        for context, continuation in (
            (ids[:400], ids[400:407]), (ids[:1], ids[1:300]), (ids[:900], ids[900:905]), (ids[:60], [best]),
        )
    ]  # fmt: skip
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    for (_, context, continuation), (total, likely) in zip(requests, found, strict=True):
        expected, most_likely = naive(model, context, continuation)
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert likely == most_likely
    assert found[-1][1]
    with pytest.raises(rx.RopeExtendError, match=f"{WINDOW + 1} tokens .* window of {WINDOW}"):
        lm._loglikelihood_tokens([(("", ""), ids[:1], ids[: WINDOW + 1])], disable_tqdm=True)
    for half in ({"method": "yarn"}, {"target_length": "1k"}):
        with pytest.raises(rx.RopeExtendError, match="method and target_length belong together"):
            ExtendedLM(str(MODEL_DIR), **half)
    assert sum(rows) == 7 + 299 + 5 + 1  # logits of the continuations alone
    prompt = text[:600]
    arguments = prompt, {"until": ["\n\n\n\n"], "max_gen_toks": 6, "do_sample": False}
    answer = lm.generate_until([Instance("generate_until", {}, arguments, 0)], disable_tqdm=True)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert 100 < ids.shape[1] < WINDOW - 6
    out = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert answer == [tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)]


def test_without_bos_and_eos_a_text_begins_after_a_line_break(tmp_path: Path) -> None:
    shutil.copytree(MODEL_DIR, tmp_path / "model")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink(missing_ok=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(MODEL_DIR / "tokenizer.json"))
    tokenizer.save_pretrained(tmp_path / "model")
    lm = ExtendedLM(str(tmp_path / "model"), max_length=WINDOW)
    assert (lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id) == (None, None)
    text = "A line of text that is scored"
    expected, _ = naive(lm.model, tokenizer.encode("\n"), tokenizer.encode(text))
    for kind, given in (("loglikelihood", ("", text)), ("loglikelihood_rolling", (text,))):
        (found,) = getattr(lm, kind)([Instance(kind, {}, given, 0)], disable_tqdm=True)
        assert (found[0] if kind == "loglikelihood" else found) == pytest.approx(expected, rel=1e-5)
    request = Instance("generate_until", {}, (text, {"until": ["\n\n\n\n"], "max_gen_toks": 6}), 0)
    assert lm.generate_until([request], disable_tqdm=True) == ExtendedLM(
        str(MODEL_DIR), max_length=WINDOW
    ).generate_until([request], disable_tqdm=True)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    with pytest.raises(rx.RopeExtendError, match="give another token, as --model_args prefix_token_id=0"):
        _line_break(words)


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize("method", few([False, True], 1))
def test_the_command_gives_the_number_of_our_evaluator(
    method: bool, adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its rolling log-likelihood is our protocol `disjoint`, on the same tokens after the same first one."""
    monkeypatch.chdir(tmp_path)  # which is in no repository
    text = Path(json.scanner.__file__)
    (tmp_path / "task.yaml").write_text(TASK.format(
        name="mine", text=text, kind="loglikelihood_rolling", prompt='""', target='"{{text}}"',
        metric="byte_perplexity",
    ))  # fmt: skip
    model = (
        [str(MODEL_DIR), "--method", "yarn", "--lengths", "256", str(WINDOW)] if method else [str(adapter)]
    )
    main(["lm-eval", *model, "--tasks", "mine", "--include_path", str(tmp_path),
          "--output_path", str(tmp_path / "out")])  # fmt: skip
    with pytest.raises(SystemExit):
        main(["lm-eval", *model, "--tasks", "no-such-task"])
    said = capfd.readouterr().err
    assert "Tasks not found: no-such-task; `lm-eval ls" in said
    assert "not a git repository" not in said
    assert ("--lengths is ignored by mine" in caplog.text) == method
    (file,) = (tmp_path / "out").rglob("results*.json")
    theirs = math.log(json.loads(file.read_text())["results"]["mine"]["byte_perplexity,none"])
    tokenizer, content = AutoTokenizer.from_pretrained(MODEL_DIR), text.read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(content)["input_ids"]])
    lm = AutoModelForCausalLM.from_pretrained(MODEL_DIR) if method else rx.load(adapter)
    if method:
        rx.extend(lm, WINDOW, "yarn")
    result = rx.perplexity(lm, [ids], [WINDOW], protocol="disjoint")
    assert theirs == pytest.approx(
        math.log(result.ppl[WINDOW]) * (len(ids) - 1) / len(content.encode()), rel=1e-5
    )
