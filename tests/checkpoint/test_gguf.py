"""GGUF files with our schedule: their contents, what is refused, and what llama.cpp computes."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import ENCODINGS, FACTOR, TARGET, TRAINED, EncodingCase, FamilyCase, divisors, llama, tiny_model
from cases import plain as plain_table
from gguf_writer import converted
from integrity import tuned
from transformers import AutoConfig, AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError, RopeShape
from rope_extend.checkpoint.export.gguf import annotate, schedule
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.record import Record, read_record
from rope_extend.checkpoint.saving import save
from rope_extend.models.loading import pretrained

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

SHAPE = RopeShape(16, 10_000.0, TRAINED)
ROWS = {str(case): case for case in ENCODINGS}
LONG = EncodingCase(
    "longrope",
    lambda shape, n: (
        [f / d for f, d in zip(plain_table(shape), divisors(shape, 1.25 * FACTOR), strict=True)],
        math.sqrt(1 + math.log(FACTOR) / math.log(TRAINED)),
    ),
    lambda shape: {
        "factor": FACTOR,
        "long_factor": divisors(shape, 1.25 * FACTOR),
        "short_factor": divisors(shape, 1.25 * FACTOR),
    },
    label="longrope-long",
)
"""LongRoPE's long list, for texts of all lengths."""
CARRIED = [c for c in (*ENCODINGS, LONG) if support(c.build(SHAPE), SHAPE, "llama.cpp").possible]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, converted."""
    return converted(llama(), tmp_path_factory.mktemp("gguf") / "plain.gguf")


def record(case: EncodingCase, model_type: str = "llama") -> Record:
    return Record(case.build(SHAPE), SHAPE, TARGET, model_type, None)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    keys = {name: entry.contents() for name, entry in reader.fields.items() if not name.startswith("GGUF.")}
    return keys, {tensor.name: tensor.data for tensor in reader.tensors}


@pytest.mark.parametrize("case", CARRIED, ids=str)
def test_the_file_says_the_schedule_and_is_read_so(plain: Path, tmp_path: Path, case: EncodingCase) -> None:
    """Frequencies and factor computed from the file, as `ggml_rope_cache_init` does."""
    path = annotate(plain, tmp_path / "ours.gguf", record(case))
    keys, tensors = read(path)
    index = np.arange(SHAPE.dim // 2)
    table = keys["llama.rope.freq_base"] ** (-2.0 * index / SHAPE.dim)
    kind = keys["llama.rope.scaling.type"]
    table /= keys["llama.rope.scaling.factor"] if kind == "linear" else 1.0
    if "rope_freqs.weight" in tensors:
        assert tensors["rope_freqs.weight"].shape == (SHAPE.dim // 2,)
        assert tensors["rope_freqs.weight"].dtype == np.float32
        table /= tensors["rope_freqs.weight"]
    expected, factor = case.oracle(SHAPE, TARGET)
    np.testing.assert_allclose(table, expected, rtol=2e-6, atol=1e-29)
    assert keys.get("llama.rope.scaling.attn_factor", 1.0) == pytest.approx(factor, rel=1e-6)
    assert (keys["llama.context_length"], keys["llama.rope.scaling.original_context_length"]) == (
        TARGET,
        TRAINED,
    )
    # The file as a model here: it has a stock config with that schedule, or is refused.
    if not (case.build(SHAPE).inv_freq(SHAPE) > 0).all():
        with pytest.raises(RopeExtendError, match="pairs of channels that do not turn"):
            pretrained(AutoConfig, str(path))
        return
    config = pretrained(AutoConfig, str(path))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    rotary(torch.zeros(1), torch.arange(TARGET)[None])  # some types follow the length
    np.testing.assert_allclose(rotary.inv_freq.double().numpy(), expected, rtol=2e-6, atol=1e-29)
    assert rotary.attention_scaling == pytest.approx(factor, rel=1e-6)
    assert config.max_position_embeddings == TARGET


def test_all_else_is_as_it_was(plain: Path, tmp_path: Path) -> None:
    before = plain.read_bytes()
    keys, tensors = read(plain)
    written, ours = read(annotate(plain, tmp_path / "ours.gguf", record(ROWS["yarn"])))
    assert plain.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["ours.gguf"]
    assert set(ours) - set(tensors) == {"rope_freqs.weight"}
    for name, data in tensors.items():
        assert data.dtype == ours[name].dtype
        np.testing.assert_array_equal(data, ours[name])
    rewritten = {"llama.context_length", "llama.rope.freq_base"}
    assert {k: v for k, v in keys.items() if k not in rewritten}.items() <= written.items()


def test_tokens_that_are_not_utf_8_are_copied_byte_for_byte(plain: Path, tmp_path: Path) -> None:
    source, data = tmp_path / "bytes.gguf", plain.read_bytes()
    assert data.count(b"t61") == 1
    source.write_bytes(data.replace(b"t61", b"\xff\xfe\x80"))
    ours = annotate(source, tmp_path / "ours.gguf", record(ROWS["yarn"]))
    tokens = gguf.GGUFReader(ours).get_field("tokenizer.ggml.tokens")
    assert [tokens.parts[index].tobytes() for index in tokens.data][60:63] == [
        b"t60",
        b"\xff\xfe\x80",
        b"t62",
    ]


def test_what_a_converter_said_before_is_replaced(tmp_path: Path) -> None:
    stale = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1}
    path = converted(llama(), tmp_path / "yarn.gguf", **stale)
    twice = annotate(path, tmp_path / "once.gguf", record(ROWS["yarn-turns"]))
    keys, tensors = read(annotate(twice, tmp_path / "twice.gguf", record(ROWS["linear"])))
    assert "rope_freqs.weight" not in tensors
    assert {key: value for key, value in keys.items() if ".rope.scaling." in key} == {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": FACTOR,
        "llama.rope.scaling.original_context_length": TRAINED,
    }


def test_architectures_are_given_what_they_read() -> None:
    def names(case: str, architecture: str) -> set[str]:
        return set(schedule(ROWS[case].build(SHAPE), SHAPE, TARGET, architecture).tensors)

    assert names("ntk_by_parts", "granite") == {"rope_freqs.weight"}
    assert names("ntk_by_parts", "phi3") == {"rope_factors_long.weight", "rope_factors_short.weight"}
    for case in ("none", "linear", "ntk", "abf"):
        assert names(case, "qwen3") == names(case, "llama") == set()
    # Without a table, only plain YaRN is possible, with its attention factor; its ramp cannot be set.
    keys = schedule(ROWS["yarn-attention"].build(SHAPE), SHAPE, TARGET, "qwen3").keys
    assert keys["rope.scaling.type"] == "yarn"
    assert keys["rope.scaling.attn_factor"] == pytest.approx(1.25 / (0.1 * np.log(FACTOR) + 1))
    for case in ("yarn-options", "yarn-turns", "llama3", "longrope-static", "p_rope"):
        with pytest.raises(RopeExtendError, match=r"llama.cpp reads none for the architecture 'qwen3'"):
            names(case, "qwen3")


def test_without_the_package_it_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = converted(llama(), tmp_path / "other.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RopeExtendError, match="needs the package gguf: pip install gguf"):
        annotate(other, tmp_path / "ours.gguf", record(ROWS["yarn"]))


def checkpoint(path: Path) -> tuple[Path, Path]:
    """A saved checkpoint, and the converter's file of its weights."""
    model = llama()
    source = converted(model, path / "plain.gguf")
    with rx.patch_model(model, ROWS["yarn-options"].build(SHAPE), target_length=TARGET):
        return save(model, path / "saved"), source


def test_an_export_is_a_directory_with_the_file_and_the_record(tmp_path: Path) -> None:
    directory, source = checkpoint(tmp_path)
    output = export(directory, tmp_path / "out", "llama.cpp", gguf=source, verify=False)
    assert sorted(path.name for path in output.iterdir()) == ["plain.gguf", "rope_extend.json"]
    assert read(output / "plain.gguf")[0]["llama.rope.scaling.attn_factor"] == pytest.approx(
        ROWS["yarn-options"].oracle(SHAPE, TARGET)[1]
    )
    assert read_record(output).encoding == ROWS["yarn-options"].build(SHAPE)
    with pytest.raises(RopeExtendError, match="already holds"):
        export(directory, output, "llama.cpp", gguf=source, verify=False)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "plain.gguf").write_bytes(b"mine")
    with pytest.raises(RopeExtendError, match=r"already holds plain\.gguf"):
        export(directory, tmp_path / "used", "llama.cpp", gguf=source, verify=False)
    before = source.read_bytes()
    with pytest.raises(RopeExtendError, match="is the source itself"):
        export(directory, tmp_path, "llama.cpp", gguf=source, verify=False, overwrite=True)
    assert source.read_bytes() == before
    other = converted(llama(head_dim=32), tmp_path / "other.gguf")
    with pytest.raises(RopeExtendError, match="has other weights than the checkpoint"):
        export(directory, tmp_path / "other", "llama.cpp", gguf=other, verify=False)


def test_an_adapter_is_refused_because_the_file_has_none_of_its_weights(tmp_path: Path) -> None:
    """A file of the base model would be exported without the adapter, and nobody would notice."""
    llama().save_pretrained(tmp_path / "base")
    source = converted(llama(), tmp_path / "base.gguf")
    adapter = save(tuned(tmp_path / "base"), tmp_path / "adapter")
    for file in (source, None):
        with pytest.raises(RopeExtendError, match=r"Merge it first \(rope-extend merge '\S+adapter' --"):
            export(adapter, tmp_path / "out", "llama.cpp", gguf=file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "base.gguf"]


@pytest.mark.parametrize(
    ("kind", "model_type", "dtype"),
    [
        ("F32", "llama", torch.bfloat16),
        ("F16", "qwen3", torch.float32),
        ("BF16", "llama", torch.float32),
        ("Q8_0", "llama", torch.bfloat16),
        ("Q8_0", "qwen3", torch.float32),
    ],
)
def test_the_file_must_have_the_weights_of_the_checkpoint(
    tmp_path: Path, model_type: str, kind: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of before a merge would be exported without what was merged, and nobody would notice.

    The file is made of the model in either dtype, with Llama's rows of queries and keys in another order.
    """
    model = tiny_model(FamilyCase(model_type, {"intermediate_size": 64}))  # Q8_0 has blocks of 32
    quantized = gguf.GGMLQuantizationType[kind]
    source = converted(model, tmp_path / "of-float32.gguf", quantized=quantized)
    model = model.to(dtype)
    rounded = converted(model, tmp_path / "of-dtype.gguf", quantized=quantized)
    with rx.patch_model(model, ROWS["yarn"].build(SHAPE), target_length=TARGET):
        whole = save(model, tmp_path / "whole")
        for number, each in enumerate((source, rounded)):
            assert export(whole, tmp_path / f"{number}", "llama.cpp", gguf=each, verify=False).is_dir()
        for name in ("self_attn.k_proj", "mlp.down_proj"):
            weight = model.get_submodule(f"model.layers.1.{name}").weight
            kept = weight.detach().clone()
            with torch.no_grad():
                weight += 0.02 * weight.std() * torch.randn_like(weight)
            merged = save(model, tmp_path / name)
            with pytest.raises(RopeExtendError, match=rf"% of the values of model.layers.1.{name}.weight"):
                export(merged, tmp_path / "out", "llama.cpp", gguf=source, verify=False)
            assert not (tmp_path / "out").exists()
            with torch.no_grad():
                weight.copy_(kept)
        rows, size = model.get_input_embeddings().weight.detach(), model.config.vocab_size
        model.resize_token_embeddings(size - 8)  # converters leave rows out that no token has, as of Gemma 3
        cut = converted(model, tmp_path / "cut.gguf", quantized=quantized)
        assert export(whole, tmp_path / "cut", "llama.cpp", gguf=cut, verify=False).is_dir()
        model.resize_token_embeddings(size)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(rows)
        coarse = converted(model, tmp_path / "q4.gguf", quantized=gguf.GGMLQuantizationType.Q4_1)
        export(whole, tmp_path / "coarse", "llama.cpp", gguf=coarse, verify=False)
        assert "matrices rounded to Q4_1 are not compared" in caplog.text
        with pytest.MonkeyPatch.context() as library:
            library.setattr(gguf, "MODEL_ARCH_NAMES", {})
            export(whole, tmp_path / "unknown", "llama.cpp", gguf=coarse, verify=False)
        assert f"the gguf library does not know {model_type}" in caplog.text


needs_llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


def llama_cpp_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """Logits `[T, vocabulary]` float32 that llama.cpp computes, with a float32 cache."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=len(tokens), n_batch=len(tokens), n_gpu_layers=0, logits_all=True, verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    model.eval(tokens)
    return torch.tensor(model.scores[: len(tokens)].copy(), dtype=torch.float32)


def largest_gap(path: Path, case: EncodingCase, model_type: str = "llama", **config: Any) -> float:
    """The largest difference of a logit between llama.cpp with our schedule and the patched model."""
    model = tiny_model(FamilyCase(model_type, config))
    with torch.no_grad(), rx.patch_model(model, case.build(SHAPE), target_length=TARGET) as patch:
        source = converted(model, path / "plain.gguf")
        ours = Record(patch.encoding, patch.shape, TARGET, model_type, None)
        ids = torch.randint(3, 64, (1, TARGET), generator=torch.Generator().manual_seed(1))
        file = annotate(source, path / "ours.gguf", ours)
        return (llama_cpp_logits(file, ids[0].tolist()) - model(ids).logits[0]).abs().max().item()


WIDE = {"head_dim": 16}
PHI3 = {"original_max_position_embeddings": TRAINED, "pad_token_id": 0}


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize(
    ("case", "model_type", "config"),
    [
        *((case, "llama", {}) for case in CARRIED),
        *((ROWS[name], "qwen3", WIDE) for name in ("linear", "ntk", "yarn", "yarn-attention")),
        *((ROWS[name], "phi3", PHI3) for name in ("yarn-options", "ntk_by_parts", "p_rope")),
    ],
    ids=str,
)
def test_llama_cpp_reads_as_we_do(
    tmp_path: Path, case: EncodingCase, model_type: str, config: dict[str, Any]
) -> None:
    """Logits at all positions of a text eight times as long as the trained window.

    llama.cpp reads a table for Llama, no table for Qwen 3, and two lists for Phi-3.
    """
    assert largest_gap(tmp_path, case, model_type, **config) < 1e-3
