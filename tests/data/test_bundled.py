"""The demonstration model and the texts that it is fine-tuned and evaluated on."""

import hashlib
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rope_extend.data import bundled


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(bundled.MODEL_DIR).eval()


def relative(files):
    return [path.relative_to(bundled.standard_library_dir()) for path in files]


@pytest.mark.slow
def test_split_is_disjoint_and_covers_the_held_out_files():
    tuning, evaluation = bundled.finetuning_files(), bundled.evaluation_files()
    assert not set(tuning) & set(evaluation)
    assert sorted([*tuning, *evaluation]) == sorted(bundled.held_out_files())
    assert 0.5 < len(tuning) / (len(tuning) + len(evaluation)) < 0.7
    assert len(evaluation) >= 30


@pytest.mark.slow
def test_split_is_deterministic():
    files = bundled.evaluation_files()
    assert files == bundled.evaluation_files()
    assert relative(files) == sorted(relative(files))
    # The split depends only on the relative path of a file, so it is the same on every machine.
    for path in relative(files):
        assert int(hashlib.sha256(path.as_posix().encode()).hexdigest()[:13], 16) / 16**13 >= 0.6


def test_min_characters_leaves_out_only_short_files():
    some, long = (
        bundled.evaluation_files(min_characters=5_000),
        bundled.evaluation_files(min_characters=60_000),
    )
    assert set(long) < set(bundled.evaluation_files()) < set(some)
    assert all(len(bundled.read_text(path)) >= 60_000 for path in long)


def test_no_tests_packages_or_tables_are_held_out():
    for path in relative(bundled.held_out_files(min_characters=0)):
        assert not {"test", "tests", "idlelib", "site-packages", "encodings", "pydoc_data"} & set(path.parts)
        assert path.as_posix() != "html/entities.py"


def test_missing_standard_library_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    with pytest.raises(FileNotFoundError, match="no source files of the Python standard library"):
        bundled.evaluation_files()


@pytest.mark.parametrize("seed", range(5))
def test_retrieval_documents_state_their_answer_once_before_it_is_asked(seed):
    passkey = bundled.passkey_document(random.Random(seed))
    assert len(passkey.answer) == 5
    assert passkey.answer.isdecimal()
    assert passkey.prompt.count(f"PASS_KEY = {passkey.answer}\n") == 1


def test_passkey_depth_places_the_number():
    first = bundled.passkey_document(random.Random(0), filler_lines=40, depth=0.0).prompt
    last = bundled.passkey_document(random.Random(0), filler_lines=40, depth=1.0).prompt
    assert first.startswith("# Remember the pass key.")
    assert last.index("# Remember") > 0.9 * len(last) - 60


def test_default_retrieval_documents_fit_in_the_window(tokenizer):
    for seed in range(200):
        document = bundled.passkey_document(random.Random(seed))
        assert len(tokenizer.encode("".join(document))) <= 256


def test_bundled_model_is_a_stock_llama_with_the_stated_window(model):
    assert type(model) is LlamaForCausalLM
    config = json.loads((bundled.MODEL_DIR / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 256
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert sum(p.numel() for p in model.parameters()) == 3_221_952
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any("custom" in key or key == "auto_map" for key in config)


def test_bundled_model_is_small():
    sizes = {path.name: path.stat().st_size for path in bundled.MODEL_DIR.iterdir()}
    assert sizes["model.safetensors"] < 12_000_000
    assert sum(sizes.values()) < 13_000_000
    wanted = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert {*wanted, "loss_curve.csv"} <= set(sizes)


def test_tokenizer_is_lossless_and_splits_digits(tokenizer):
    path = bundled.evaluation_files()[0]
    text = bundled.read_text(path)[:20_000] + "\n\ttäb – 12345\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 4096
    assert tokenizer.model_max_length == 256
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("= 120"))[-3:] == ["1", "2", "0"]


@pytest.mark.slow
@torch.no_grad()
def test_bundled_model_predicts_unseen_python(model, tokenizer):
    rows = []
    for path in bundled.evaluation_files()[:16]:
        ids = tokenizer.encode(bundled.read_text(path))
        rows.append(torch.tensor(ids[1024:1280]))
    ids = torch.stack(rows)
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 3.4


@pytest.mark.slow
@torch.no_grad()
def test_bundled_model_retrieves_inside_its_window(model, tokenizer):
    solved = 0
    for seed in range(20):
        document = bundled.passkey_document(random.Random(seed))
        prompt = tokenizer(document.prompt, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=5, do_sample=False)
        solved += tokenizer.decode(output[0, prompt.input_ids.shape[1] :]) == document.answer
    assert solved >= 10
