"""`rx.info` of what cannot be read, and of a checkpoint that was loaded without its encoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batches import tokens
from cases import TARGET, llama, tiny_model
from integrity import logits
from test_families import case_of
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_config_that_cannot_be_read_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RopeExtendError):
        rx.info(tmp_path)


@pytest.mark.parametrize(
    "method", ["yarn", "dynamic_ntk", "dynamic_yarn", "logn(yarn)", "short_original(yarn)"]
)
def test_a_new_model_with_the_config_of_a_patched_one(method: str) -> None:
    """Only yarn is the same for stock transformers: its dynamic NTK grows from the window of the config."""
    model, ids = llama(), tokens(1, TARGET)
    rx.extend(model, TARGET, method)
    new = AutoModelForCausalLM.from_config(model.config).eval()
    new.load_state_dict(model.state_dict())
    same = torch.allclose(new(ids).logits, model(ids).logits, atol=1e-4)
    assert same == (method == "yarn")
    assert rx.info(model).unapplied is None
    assert rx.info(new).unapplied == (None if same else str(rx.current_patch(model).encoding))


@pytest.mark.slow
def test_a_checkpoint_that_stock_transformers_cannot_represent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its config names the encoding; after stock `from_pretrained`, its tables are those of pretraining."""
    model = tiny_model(case_of("gemma4_text"))
    rx.extend(model, TARGET, "yarn")
    encoding = rx.info(model).encoding
    model.save_pretrained(tmp_path / "stock")
    rx.save(model, tmp_path / "ours")
    assert rx.info(model).unapplied is None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    found = rx.info(loaded)
    assert (found.unapplied, found.start) == (encoding, "pretrained")
    assert found.encoding != encoding
    assert "load it with rope_extend.load" in caplog.text
    with pytest.raises(RopeExtendError, match=r"names yarn.* load it with rope_extend\.load"):
        rx.extend(loaded, 2 * TARGET, "linear", start="current")
    # The directory is described as rope_extend.load loads it.
    ours = rx.info(tmp_path / "ours")
    assert (ours.encoding, ours.unapplied) == (encoding, None)
    loaded = rx.load(tmp_path / "ours")
    assert rx.info(loaded).unapplied is None
    assert torch.equal(logits(loaded), logits(model))
