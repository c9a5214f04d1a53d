"""Dual chunk attention for SGLang: the key means our map, and is written only where it is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, TRAINED, FamilyCase, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError, RopeShape
from rope_extend.checkpoint.export.support import IMPOSSIBLE, PLUGIN, support
from rope_extend.checkpoint.export.write import export
from rope_extend.checkpoint.verifying import VERIFICATION_NAME
from rope_extend.cli.main import main
from rope_extend.encodings import DualChunk

SHAPE = RopeShape(16, 10_000.0, TRAINED)
METHOD = rx.encoding("dual_chunk", chunk=16, local=5)
SELF_EXTEND = rx.encoding("self_extend", group=4, window=8)
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
KEY = "dual_chunk_attention_config"


def saved(directory: Path, method: Any = METHOD, model_type: str = "qwen2", **config: Any) -> Path:
    model = tiny_model(FamilyCase(model_type, config))
    with rx.patch_model(model, method, target_length=TARGET):
        return rx.save(model, directory)


def positions_of_sglang(config: dict[str, int], total: int) -> Tensor:
    """The distance of each pair in `DualChunkRotaryEmbedding` and its backend, NaN for later keys.

    The embedding has tables of positions for a query in its own chunk (`q`), for the chunk before (`qc`), and
    one row of the latter for all earlier chunks. The prefill goes through the chunks of queries.
    """
    length = config["chunk_size"] - config["local_size"]
    q_t = torch.arange(length)
    qc_t = (torch.arange(length) + length).clamp(max=config["chunk_size"])
    k_t = torch.arange(total) % length
    found = torch.full((total, total), float("nan"), dtype=torch.float64)
    for begin in range(0, total, length):
        for i in range(begin, min(begin + length, total)):
            found[i, begin : i + 1] = (q_t[i % length] - k_t[begin : i + 1]).double()
            if begin >= length:
                found[i, begin - length : begin] = (qc_t[i % length] - k_t[begin - length : begin]).double()
            if begin >= 2 * length:
                found[i, : begin - length] = (qc_t[length - 1] - k_t[: begin - length]).double()
    return found


@pytest.mark.parametrize(("chunk", "local"), [(16, 5), (16, 40), (7, 1), (1, 1)])
def test_the_key_means_our_map(chunk: int, local: int) -> None:
    """The distances of all pairs, and no factor on the logits of texts within the window."""
    method = DualChunk(chunk, local)
    form = support(method, SHAPE, "sglang", "qwen2", target_length=TARGET).form
    assert form is not None
    config, total = form[KEY], 90
    queries, keys = torch.arange(total)[:, None], torch.arange(total)
    ours = method.distance(SHAPE, queries, keys.clamp(max=queries))
    causal = keys <= queries
    assert torch.equal(positions_of_sglang(config, total)[causal], ours[causal])
    lengths = torch.arange(1, TARGET + 1)
    factor = (0.1 * torch.log(lengths / config["original_max_position_embeddings"]) + 1).clip(min=1)
    assert torch.equal(factor, torch.ones(TARGET))


def test_an_export_has_the_key_and_is_the_stock_model_within_a_chunk(tmp_path: Path) -> None:
    directory = saved(tmp_path / "saved")
    out = export(directory, tmp_path / "out", "sglang", verify=False)
    config = json.loads((out / "config.json").read_text())
    assert config[KEY] == {"chunk_size": 21, "local_size": 5, "original_max_position_embeddings": TARGET}
    assert (config["model_type"], config["max_position_embeddings"]) == ("qwen2", TARGET)
    assert config["rope_parameters"]["rope_type"] == "default"
    ids = torch.arange(3, 3 + 16)[None]
    with torch.no_grad():
        stock, patched = AutoModelForCausalLM.from_pretrained(out).eval(), rx.load(directory)
        assert torch.equal(stock(ids).logits, patched(ids).logits)
        assert torch.equal(rx.load(out)(ids.repeat(1, 4)).logits, patched(ids.repeat(1, 4)).logits)


@pytest.mark.slow
def test_an_export_is_compared_within_a_chunk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved(tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        out = export(directory, tmp_path / "out", "sglang")
    assert "up to 16, one chunk: stock transformers ignores" in caplog.text
    assert json.loads((out / VERIFICATION_NAME).read_text())["length"] == 16


@pytest.mark.parametrize(
    ("to", "method", "model_type", "config", "reason"),
    [
        ("sglang", METHOD, "llama", {}, rf"it reads {KEY} in models of qwen2, qwen2_moe, qwen3_moe only"),
        ("sglang", SELF_EXTEND, "qwen2", {}, r"distant pairs .* another way"),
        ("sglang", METHOD, "qwen2", SLIDING, r"layers with a sliding window, where sglang would apply"),
        ("vllm", METHOD, "qwen2", {}, r"distant pairs .* another way .*can be exported to sglang"),
        ("llama.cpp", METHOD, "qwen2", {}, r"distant pairs .* another way"),
        ("transformers", METHOD, "qwen2", {}, r"distant pairs .* another way"),
    ],
)
def test_the_key_is_written_only_where_it_is_read(
    to: str, method: Any, model_type: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    if not config:
        found = support(method, SHAPE, to, model_type, target_length=TARGET)
        assert found.verdict == (PLUGIN if to == "transformers" else IMPOSSIBLE)
    directory = saved(tmp_path / "saved", method, model_type, **config)
    with pytest.raises(
        RopeExtendError, match=reason if config else rf"cannot be exported to {to}: .*{reason}"
    ):
        export(directory, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


DUAL_CHUNK = {"chunk_size": 48, "local_size": 16, "original_max_position_embeddings": TRAINED}


def test_the_key_of_another_encoding_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pretrained model may have it, as Qwen2.5-1M, and engines would apply it to YaRN as well."""
    model = tiny_model(FamilyCase("qwen2", {KEY: DUAL_CHUNK}))
    model.save_pretrained(tmp_path / "base")
    assert rx.info(tmp_path / "base").dual_chunk == DUAL_CHUNK
    main(["info", str(tmp_path / "base")])
    assert f"the config has {KEY}; stock transformers ignores it" in capsys.readouterr().out
    with rx.extend(model, TARGET, "yarn"):
        rx.save(model, tmp_path / "saved")
        assert rx.info(model).dual_chunk is None
    assert getattr(model.config, KEY) == DUAL_CHUNK
    config = tmp_path / "saved" / "config.json"
    values = json.loads(config.read_text())
    assert KEY not in values
    # As saved by an earlier version, or with a nested config.
    config.write_text(json.dumps({**values, KEY: DUAL_CHUNK, "audio_config": {KEY: DUAL_CHUNK}}))
    rx.record_encoding(tmp_path / "saved", rx.load(tmp_path / "saved", check_files=False))
    for to in ("sglang", "vllm", "transformers"):
        out = export(tmp_path / "saved", tmp_path / to, to, verify=False)
        assert KEY not in (out / "config.json").read_text()


def test_the_key_of_an_export_ends_with_its_encoding(tmp_path: Path) -> None:
    exported = export(saved(tmp_path / "saved"), tmp_path / "sglang", "sglang", verify=False)
    model = rx.load(exported)
    patch = rx.current_patch(model)
    assert patch is not None
    patch.remove()
    assert not hasattr(model.config, KEY)
    with rx.extend(model, TARGET, "yarn"):
        out = export(model, tmp_path / "yarn", "sglang", verify=False)
    config = json.loads((out / "config.json").read_text())
    assert KEY not in config
    assert config["rope_parameters"]["rope_type"] == "yarn"
