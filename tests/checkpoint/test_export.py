"""Exports keep their promises: each verdict is proven in stock transformers, or the export is refused."""

from __future__ import annotations

import copy
import json
import math
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ENCODINGS, FACTOR, FAMILIES, TARGET, TRAINED, EncodingCase, FamilyCase, tiny_model
from integrity import contents, logits, tuned
from rotary_cases import scaling, stock
from tolerances import assert_same_but_rounding
from transformers import AutoConfig, AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError, RopeShape
from rope_extend.checkpoint.export.support import FACTORS, IMPOSSIBLE, NATIVE, PLUGIN, support
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.checkpoint.exporting import _stock_computes, _with_form, export, stock_pairs
from rope_extend.checkpoint.record import read_record
from rope_extend.checkpoint.saving import save
from rope_extend.cli.main import main
from rope_extend.models.checkpoint_directory import RECORD_NAME
from rope_extend.models.loading import empty_model
from rope_extend.models.rotary_tables import shape_of

SHAPE = RopeShape(16, 10_000.0, TRAINED)
RAMP = {"truncate": False, "beta_fast": 2.0, "beta_slow": 0.1}
"""Both servers round the ends of YaRN's ramp unless `truncate` is false, which here makes a difference."""
FINE = EncodingCase("yarn", stock("yarn", **RAMP), {"factor": FACTOR, **RAMP}, "yarn-fine")
ROWS = {str(case): case for case in (*ENCODINGS, FINE)}
FAMILY = {case.model_type: case for case in FAMILIES}


def saved(directory: Path, case: EncodingCase, model_type: str = "llama") -> tuple[Path, torch.Tensor]:
    """A checkpoint, and the logits of the model that was saved."""
    model = tiny_model(FAMILY[model_type])
    with rx.patch_model(model, case.build(shape_of(model)), target_length=TARGET):
        return save(model, directory), logits(model)


N, F, P, X = NATIVE, FACTORS, PLUGIN, IMPOSSIBLE
VERDICTS = [
    # target: transformers, vllm, sglang, llama.cpp
    (None, ("none", "linear", "ntk", "abf"), (N, N, N, N)),
    (None, ("yarn", "yarn-fine", "llama3"), (N, N, N, F)),
    (None, ("yarn-attention", "yarn-options"), (N, F, F, F)),
    (None, ("yarn-turns", "ntk_by_parts", "resonance", "power", "p_rope", "clipped", "nope"), (F, F, F, F)),
    (None, ("logn(ntk)", "xpos", "drope", "longrope-start", "short_original(yarn)"), (P, X, X, X)),
    (None, ("dynamic_yarn", "dynamic_ntk"), (P, X, X, X)),
    ("phi3", ("yarn",), (F, F, F, F)),
    ("mistral", ("yarn-turns",), (F, F, F, F)),
    # llama.cpp reads no table for these; longrope of the servers does not rotate neighbours, as GLM does.
    ("qwen3", ("yarn-turns",), (F, F, F, X)),
    ("qwen3", ("ntk",), (N, N, N, N)),
    ("glm", ("yarn-turns",), (F, X, X, X)),
    # We do not know how others read one table for each kind of layer.
    ("gemma3_text", ("yarn", "abf"), (N, X, X, X)),
    ("deepseek_v3", ("abf",), (N, N, N, N)),
    ("deepseek_v3", ("yarn",), (N, X, X, N)),
]
"""A target is one column here, and one record in `targets.py`."""


@pytest.mark.parametrize(("model_type", "names", "expected"), VERDICTS)
def test_verdicts_are_those_of_the_sources(
    model_type: str | None, names: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    for name in names:
        found = [support(ROWS[name].build(SHAPE), SHAPE, to, model_type) for to in TARGETS]
        assert tuple(each.verdict for each in found) == expected, name
        for each in found:
            assert each.possible == (each.verdict in (NATIVE, FACTORS))
            assert each.reason


def test_what_servers_multiply_is_given_undivided() -> None:
    """vLLM and SGLang multiply the stated window by `linear`'s factor."""
    for to in ("vllm", "sglang"):
        form = support(ROWS["linear"].build(SHAPE), SHAPE, to).form
        assert form is not None
        assert form["max_position_embeddings"] * form["rope_parameters"]["factor"] == TARGET


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "name", ["yarn-attention", "yarn-options", "ntk_by_parts", "longrope-static", "p_rope"]
)
def test_servers_compute_the_table_from_the_form(name: str, to: str) -> None:
    """`Phi3LongRoPEScaledRotaryEmbedding`, which both servers have: tables by position, and lookups."""
    found = support(ROWS[name].build(SHAPE), SHAPE, to, target_length=TARGET)
    assert found.form is not None
    p, window = found.form["rope_parameters"], found.form["max_position_embeddings"]
    original = p["original_max_position_embeddings"]
    scale = window / original
    default = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    caches = []
    for rows, which in ((original, "short"), (window, "long")):
        base = p["rope_theta"] ** (torch.arange(0, SHAPE.dim, 2, dtype=torch.float) / SHAPE.dim)
        inv_freq = 1.0 / (torch.tensor(p[f"{which}_factor"], dtype=torch.float32) * base)
        angles = torch.arange(rows, dtype=torch.float)[:, None] * inv_freq
        caches.append(torch.polar(torch.tensor(p.get(f"{which}_mscale", default)), angles))
    cache = torch.cat(caches)
    table, factor = ROWS[name].oracle(SHAPE, TARGET)
    for positions in (torch.arange(TARGET), torch.tensor([TRAINED]), torch.tensor([TARGET - 1])):
        if to == "vllm":  # the long list, because the window exceeds the original one
            index = positions + original * (window > original)
        else:
            index = positions + original * bool((positions > original).any())
        angles = positions[:, None].double() * torch.tensor(table, dtype=torch.float64)
        expected = torch.polar(torch.tensor(factor, dtype=torch.float64), angles)
        torch.testing.assert_close(cache[index].to(expected.dtype), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["yarn-attention", "yarn-fine", "linear", "p_rope"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_servers_are_given_the_form_and_stock_transformers_computes_it(
    tmp_path: Path, family: str, name: str, to: str
) -> None:
    directory, expected = saved(tmp_path / "saved", ROWS[name], family)
    record = read_record(directory)
    form = support(record.encoding, record.shape, to, family, target_length=TARGET).form
    assert form is not None
    stock = AutoModelForCausalLM.from_pretrained(export(directory, tmp_path / "out", to, verify=False))
    assert_same_but_rounding(logits(stock), expected)
    parameters, window = stock.config.rope_parameters, stock.config.max_position_embeddings
    assert {key: parameters[key] for key in form["rope_parameters"]} == form["rope_parameters"]
    assert window == form["max_position_embeddings"]


def stock_rotary(directory: Path, family: FamilyCase, form: dict[str, Any], **changes: Any) -> Any:
    """The rotary module that stock transformers makes of a model's config in another form."""
    config = copy.deepcopy(tiny_model(family).config)
    for name, value in changes.items():
        setattr(config, name, value)
    given = {"rope_parameters": form, "max_position_embeddings": TARGET}
    (directory / "config.json").write_text(json.dumps(_with_form(config.to_dict(), config, given)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return type(model.model.rotary_emb)(model.config)


def test_a_form_is_completed_for_its_family(tmp_path: Path) -> None:
    """Phi-3.5-MoE has factors on cos and sin of its own, for short and for long texts."""
    divisors = [FACTOR] * (SHAPE.dim // 2)
    form = scaling("longrope", short_factor=divisors, long_factor=divisors, attention_factor=1.25)
    rotary = stock_rotary(tmp_path, FAMILY["phimoe"], form)
    for length in (TRAINED, TARGET):
        cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
        torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.25**2))


def test_a_form_that_changes_the_scale_of_logits_is_refused(tmp_path: Path) -> None:
    """In DeepSeek's families, it follows from the rotary parameters: equal tables are not enough."""
    for model_type in ("llama", "deepseek_v3"):
        directory, _ = saved(tmp_path / model_type, ROWS["linear"], model_type)
        record, pairs = read_record(directory), stock_pairs(empty_model(str(directory)))
        assert _stock_computes(directory, record, pairs, as_saved=True)
        assert _stock_computes(directory, record, pairs, as_saved=False) == (model_type == "llama")


def test_the_documentation_is_what_the_code_says() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "write_export_support.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["page"](), "run tools/write_export_support.py"
    assert {encoding.name for encoding in script["examples"](SHAPE, TARGET)} == set(rx.encoding_names())


def test_weights_are_those_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = saved(tmp_path / "saved", ROWS["p_rope"])
    (directory / "tokenizer.json").write_text("{}")
    (directory / "optimizer.pt").write_bytes(b"state")
    before = contents(directory)
    output = export(directory, tmp_path / "out", verify=False)
    assert contents(output).keys() == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", RECORD_NAME,
    }  # fmt: skip
    assert os.path.samefile(output / "model.safetensors", directory / "model.safetensors")
    assert not os.path.samefile(output / "tokenizer.json", directory / "tokenizer.json")
    assert contents(directory) == before
    assert read_record(output).weights == read_record(directory).weights

    def other_disk(*_: Any, **__: Any) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    copied = export(directory, tmp_path / "copied", verify=False)
    assert not os.path.samefile(copied / "model.safetensors", directory / "model.safetensors")
    assert contents(copied) == contents(output)


@pytest.mark.slow
def test_an_export_is_verified_and_one_that_reads_otherwise_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = saved(tmp_path / "saved", ROWS["clipped"])
    assert export(directory, tmp_path / "out").is_dir()
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    monkeypatch.setattr("rope_extend.checkpoint.exporting._stock_computes", lambda *_, **__: True)
    monkeypatch.setattr("rope_extend.checkpoint.exporting.plain_config", lambda data: {**data, **plain})
    with pytest.raises(RopeExtendError, match="computes other logits than the original"):
        export(directory, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_the_key_of_another_encoding_is_left_out(tmp_path: Path) -> None:
    """A pretrained model may have it, as Qwen2.5-1M, and engines would apply it to YaRN as well."""
    key, value = "dual_chunk_attention_config", {"chunk_size": 48, "local_size": 16}
    model = tiny_model(FamilyCase("qwen2", {key: value}))
    with rx.extend(model, TARGET, "yarn"):
        rx.save(model, tmp_path / "saved")
    assert getattr(model.config, key) == value
    assert key not in (tmp_path / "saved" / "config.json").read_text()


def test_an_adapter_is_merged_first(tmp_path: Path) -> None:
    tiny_model(FAMILY["llama"]).save_pretrained(tmp_path / "base")
    model = tuned(tmp_path / "base", "ntk_by_parts")
    output = rx.export(save(model, tmp_path / "adapter"), tmp_path / "out", verify=False)
    assert_same_but_rounding(logits(AutoModelForCausalLM.from_pretrained(output).eval()), logits(model))
    assert not list(output.glob("tmp*"))


def test_the_command_exports_and_prints_what_is_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, expected = saved(tmp_path / "saved", ROWS["p_rope"])
    output = tmp_path / "out"
    main(["export", str(directory), "--to", "vllm", "--output", str(output), "--no-verify"])
    assert capsys.readouterr().out == f"written: {output}\n"
    assert_same_but_rounding(logits(AutoModelForCausalLM.from_pretrained(output).eval()), expected)
    main(["export", str(directory), "--support"])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [*TARGETS]
    assert all(FACTORS in line for line in lines)
