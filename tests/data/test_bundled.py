"""The demonstration model and the texts that it is fine-tuned and evaluated on."""

import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rope_extend.data import bundled
from rope_extend.errors import RopeExtendError


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(bundled.MODEL_DIR).eval()


def test_the_split_depends_on_the_paths_alone() -> None:
    """So it is the same on every machine, and both parts are disjoint."""
    root = bundled.standard_library_dir()
    tuning, evaluation = (
        [path.relative_to(root) for path in files]
        for files in (bundled.finetuning_files(), bundled.evaluation_files())
    )
    for files, expected in ((tuning, True), (evaluation, False)):
        assert files == sorted(files)
        for path in files:
            share = int(hashlib.sha256(path.as_posix().encode()).hexdigest()[:13], 16) / 16**13
            assert (share < 0.6) == expected
            assert (root / path).stat().st_size >= bundled.MIN_CHARACTERS
            assert not {"test", "idlelib", "site-packages", "encodings", "pydoc_data"} & set(path.parts)
    assert 0.5 < len(tuning) / (len(tuning) + len(evaluation)) < 0.7
    assert len(evaluation) >= 30


def test_missing_standard_library_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    with pytest.raises(RopeExtendError, match="no source files of the Python standard library"):
        bundled.evaluation_files()


def test_bundled_model_is_a_small_stock_llama_with_the_stated_window(model):
    assert type(model) is LlamaForCausalLM
    config = json.loads((bundled.MODEL_DIR / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("llama", 256)
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert sum(p.numel() for p in model.parameters()) == 3_221_952
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any("custom" in key or key == "auto_map" for key in config)
    assert sum(path.stat().st_size for path in bundled.MODEL_DIR.iterdir()) < 13_000_000


def test_tokenizer_is_lossless_and_splits_digits(tokenizer):
    text = bundled.read_text(bundled.evaluation_files()[0])[:20_000] + "\n\ttäb – 12345\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.model_max_length) == (4096, 256)
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("= 120"))[-3:] == ["1", "2", "0"]


@pytest.mark.slow
@torch.no_grad()
def test_bundled_model_predicts_unseen_python(model, tokenizer):
    rows = [tokenizer.encode(bundled.read_text(path))[1024:1280] for path in bundled.evaluation_files()[:16]]
    ids = torch.tensor(rows)
    assert model(input_ids=ids, labels=ids).loss.item() < 3.4
