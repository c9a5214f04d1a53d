"""Estimates compared with measurements: memory by counting live bytes, operations by formula."""

from __future__ import annotations

import copy
import logging
import shlex
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ALTERNATIVES, ENCODINGS, FAMILIES, TARGET, TRAINED, EncodingCase, tiny_config, tiny_model
from covering import few
from peft import LoraConfig, get_peft_model
from test_perplexity import texts
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.encodings import rotary_method
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import forward_plan as planning
from rope_extend.evaluation.chunked_forward import TRIAL_CHUNKS
from rope_extend.evaluation.flops import Rates, operations_of
from rope_extend.evaluation.forward_plan import ForwardPlan, plan_forward
from rope_extend.evaluation.loss_computer import RunOptions
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.memory.budget import _control_group, weight_bytes
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.rotary_tables import shape_of

CPU = LoadOptions(device="cpu", dtype=torch.float32)
COMMON: dict[str, Any] = {"max_position_embeddings": 256, "hidden_size": 128, "num_attention_heads": 8}
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2}
SHAPES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(vocab_size=4096, intermediate_size=512, num_hidden_layers=4, **GROUPED),
    "large vocabulary": LlamaConfig(
        vocab_size=32_768, intermediate_size=128, num_hidden_layers=2, tie_word_embeddings=True, **COMMON
    ),
    "sliding window": Qwen2Config(
        vocab_size=1000, intermediate_size=512, num_hidden_layers=4, use_sliding_window=True,
        sliding_window=100, layer_types=["full_attention", "sliding_attention"] * 2, **GROUPED,
    ),
    "eager": Gemma2Config(
        vocab_size=1000, intermediate_size=512, num_hidden_layers=4, head_dim=16, sliding_window=128,
        **GROUPED,
    ),
    "neox": GPTNeoXConfig(vocab_size=1000, intermediate_size=512, num_hidden_layers=3, **COMMON),
    "experts": MixtralConfig(vocab_size=1000, intermediate_size=256, num_hidden_layers=2, **GROUPED),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measured_rates", lambda *_: Rates(1e9, 5e8))


def checkpoint(config: PretrainedConfig, directory: Path) -> str:
    config.save_pretrained(directory)  # and no weights
    return str(directory)


def made(model: str, lengths: list[int], **how: Any) -> ForwardPlan:
    found = plan_forward(model, lengths, **{"load_options": CPU, **how})
    assert found is not None
    return found


def measured(model: torch.nn.Module, tokens: int, chunk: int | None) -> int:
    """Peak bytes while perplexity is measured, including the weights."""
    text = texts(tokens, vocabulary=1000)
    with LiveBytes() as memory:
        for tensor in (*model.parameters(), *model.buffers()):
            memory.add(tensor)
        perplexity(model, text, [tokens], options=RunOptions(chunk=chunk), progress=False)
    return memory.peak


METHODS = {"llama": [None, "yarn", "dynamic_ntk"], "sliding window": [None, "dynamic_ntk"]}


@pytest.mark.parametrize(
    ("name", "method", "chunk"),
    few(
        [
            (name, method, chunk)
            for name in SHAPES
            for method in METHODS.get(name, [None])
            for chunk in (None, 192, 64)
        ],
        14,
    ),
)
def test_memory_is_as_estimated(name: str, method: str | None, chunk: int | None, tmp_path: Path) -> None:
    """To 5 %: the run is the same, except for its trial of a dozen tokens and the chunks that are skipped."""
    tokens = 768
    model = AutoModelForCausalLM.from_config(SHAPES[name]).eval()
    encoding = rotary_method(method).for_target(shape_of(model), 2048) if method else None
    found = made(checkpoint(SHAPES[name], tmp_path), [tokens], encodings=[encoding], chunk=chunk).longest
    if encoding is not None:
        rx.patch_model(model, encoding)
    assert found.total == pytest.approx(measured(model, tokens, chunk), rel=0.05)
    assert found.strategy == ("in one pass" if chunk is None else "layer by layer")
    assert found.chunk_size == (chunk or tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "chunk"), few(product(("yarn", "dynamic_ntk", "alibi", "fire", "t5_bias"), (None, 192)), 10, 1)
)
def test_the_memory_of_an_adapter_is_estimated_too(chunk: int | None, method: str, tmp_path: Path) -> None:
    """To 5 %: its weights, and the states of its layers, which are as wide as those of the model."""
    base = str(tmp_path / "base")
    AutoModelForCausalLM.from_config(SHAPES["llama"]).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    patch = rx.extend(model, 2048, method)
    rx.save(get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")), tmp_path / "adapter")
    tuned = rx.load(tmp_path / "adapter").eval()
    found = made(base, [768], chunk=chunk, encodings=[None, (tmp_path / "adapter", patch.encoding)]).longest
    peak = measured(tuned, 768, chunk)
    assert found.total == pytest.approx(peak, rel=0.05)
    assert found.total > made(base, [768], chunk=chunk).longest.total


def one_of_each_method() -> list[Any]:
    """The first case of each method, and one that is computed per row; the others are marked `full`."""
    cases = [*ENCODINGS, *ALTERNATIVES]
    first: dict[Any, Any] = {}
    for case in cases:
        first.setdefault((case.name, str(case).endswith("-row")), case)
    rest = [pytest.param(case, marks=pytest.mark.full) for case in cases if case not in first.values()]
    return [*few(first.values(), 39, 3), *rest]


@pytest.mark.parametrize("case", one_of_each_method(), ids=str)
def test_the_memory_of_any_encoding_is_estimated(case: Any, tmp_path: Path) -> None:
    """To 2 %, whole, and in chunks if the model can process them."""
    config = copy.deepcopy(SHAPES["llama"])
    config.max_position_embeddings, config.num_hidden_layers = TRAINED, 3  # plans leave one between out
    model = AutoModelForCausalLM.from_config(config).eval()
    made_of = case.build(shape_of(model)) if isinstance(case, EncodingCase) else case.build()
    if made_of.name == "learned":
        made_of = replace(made_of, rows=TARGET)
    name = checkpoint(config, tmp_path)
    for chunk in (None, 64):
        found = made(name, [TARGET], encodings=[made_of], chunk=chunk).longest
        with rx.patch_model(model, made_of, target_length=TARGET):
            assert found.total == pytest.approx(measured(model, TARGET, chunk), rel=0.02)


@pytest.mark.slow
def test_the_encoding_that_needs_most_memory_counts(tmp_path: Path) -> None:
    model = checkpoint(SHAPES["llama"], tmp_path)
    shape = shape_of(CPU.empty(model))
    yarn, fire = rotary_method("yarn").for_target(shape, 2048), rx.encoding("fire")
    one, other, both = (
        made(model, [2048], encodings=encodings).longest.total
        for encodings in ([yarn], [fire], [yarn, fire, yarn])
    )
    assert one < other == both


def test_short_windows_count_as_batches(tmp_path: Path) -> None:
    model = checkpoint(SHAPES["llama"], tmp_path)
    alone, together = (made(model, [128], batched=batched).longest for batched in (False, True))
    assert together.total > 5 * alone.total - 4 * made(model, [128]).longest.weights
    assert made(model, [4096]).longest.total == pytest.approx(together.total, rel=0.05)  # 4096 tokens


def test_weights_are_counted_once_and_in_their_dtype(tmp_path: Path) -> None:
    """A tied head has no parameters of its own."""
    model = checkpoint(SHAPES["large vocabulary"], tmp_path)
    real = AutoModelForCausalLM.from_config(SHAPES["large vocabulary"])
    floats = sum(parameter.numel() for parameter in real.parameters())
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        found = made(model, [64], load_options=replace(CPU, dtype=dtype)).longest
        assert found.weights == pytest.approx(size * floats, rel=1e-4)


def test_quantized_weights(tmp_path: Path) -> None:
    model = CPU.empty(checkpoint(SHAPES["llama"], tmp_path))
    inner = [module.weight for name, module in model.named_modules() if name.endswith("_proj")]
    outer = sum(parameter.numel() for parameter in model.parameters()) - sum(w.numel() for w in inner)
    how = replace(CPU)
    for kind, each in (("8bit", 1), ("4bit", 0.5625)):
        object.__setattr__(how, "quantize", kind)  # as if bitsandbytes were installed
        expected = 4 * outer + each * sum(w.numel() for w in inner) + 4 * max(w.numel() for w in inner)
        assert weight_bytes(str(tmp_path), model, how) == pytest.approx(expected, rel=1e-3)
    (tmp_path / "model.safetensors").write_bytes(bytes(12_345))
    model.config.quantization_config = {"quant_method": "gptq"}
    assert weight_bytes(str(tmp_path), model, CPU) == 12_345


def test_operations_are_those_of_the_matrices_and_of_the_unmasked_pairs(tmp_path: Path) -> None:
    config = SHAPES["sliding window"]
    model, tokens = checkpoint(config, tmp_path), 1000
    real = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for n, p in real.named_parameters() if p.ndim == 2 and "embed" not in n)
    full = tokens * (tokens + 1) / 2
    near = sum(min(query + 1, 100) for query in range(tokens))
    attention = 4 * 128 * 2 * (full + near)  # two layers of each kind; products with keys and with values
    found = made(model, [tokens]).longest
    assert found.seconds == pytest.approx(2 * matrices * tokens / 1e9 + attention / 5e8, rel=1e-3)


@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v32", "gpt_neox", "gemma2", "mixtral"])
def test_operations_are_those_that_a_run_does(model_type: str) -> None:
    """Falcon and DeepSeek's indexer multiply queries and keys without an attention function."""
    model = tiny_model(model_type)
    tokens = 200
    model.config._attn_implementation = "eager"  # computes all pairs, including the masked ones
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None] % 64, use_cache=False)
    operations = operations_of(model.to("meta"))
    pairs = sum(operations.pairs.values()) * tokens**2
    assert operations.linear * tokens + pairs == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.slow
def test_a_length_that_does_not_fit_is_refused_with_the_longest_that_does(tmp_path: Path) -> None:
    model = checkpoint(SHAPES["llama"], tmp_path)
    how = replace(CPU, limit_memory=int(0.8 * made(model, [8192], chunk=256).longest.total))
    found = made(model, [1024, 8192], load_options=how)
    assert [found.budget.fits(one) for one in found.lengths] == [True, False]
    assert found.longest_fit is not None
    assert 1024 <= found.longest_fit < 8192
    with pytest.raises(RopeExtendError, match=rf"8,192 .* up to {found.longest_fit:,} tokens fit"):
        found.check()
    made(model, [found.longest_fit], load_options=how).check()
    with pytest.raises(RopeExtendError):
        made(model, [found.longest_fit + 256], load_options=how).check()
    with pytest.raises(RopeExtendError, match="no length fits"):
        made(model, [1024], load_options=replace(CPU, limit_memory=1000)).check()


def test_weights_on_other_devices_leave_the_memory_to_activations(tmp_path: Path) -> None:
    model = checkpoint(SHAPES["large vocabulary"], tmp_path)
    plain = made(model, [256])
    limit = int(1.2 * plain.longest.peak)
    small = made(model, [256], load_options=replace(CPU, limit_memory=limit))
    assert not small.budget.fits(small.longest)
    spread = LoadOptions(device_map="auto", dtype=torch.float32, limit_memory=limit)
    if torch.cuda.is_available():
        pytest.skip("on a GPU the logits are computed in larger chunks")
    made(model, [256], load_options=spread).check()


def test_processes_share_the_memory_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit is that of each process."""
    monkeypatch.setattr("rope_extend.memory.plan.available_memory", lambda _: 8_000_000_000)
    model = checkpoint(SHAPES["llama"], tmp_path)
    for limit, available in ((None, 4 * 10**9), (10**9, 10**9), (5 * 10**9, 4 * 10**9)):
        how = replace(CPU, split_window=2, limit_memory=limit)
        assert made(model, [64], load_options=how).budget.available == available


def test_a_container_has_less(tmp_path: Path) -> None:
    assert _control_group(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 150\nactive_file 50\n")
    assert _control_group(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("1000\n")
    assert _control_group(tmp_path) == 1000 - 300 + 150


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_nearly_every_family_has_a_plan(family: Any, tmp_path: Path) -> None:
    # More than three chunks, so that some are skipped.
    found = plan_forward(checkpoint(tiny_config(family), tmp_path), [64, 256], load_options=CPU, chunk=64)
    if family.model_type in ("longcat_flash", "jetmoe"):
        assert found is None
    else:
        assert found is not None
        assert 0 < found.lengths[0].total <= found.lengths[1].total


@pytest.mark.slow
def test_the_command_prints_the_plan_and_does_nothing(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((work / "model" / name).read_bytes())  # without weights
    before = set(tmp_path.iterdir())
    main(shlex.split(f"evaluate {tmp_path} --plan --lengths 64,256 --methods yarn,dynamic_ntk"))
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines[:3]] == ["32", "64", "256"]  # 32: the trained window
    assert set(tmp_path.iterdir()) == before
    data = f"--data {work / 'data'} --output {tmp_path / 'no'}"
    for arguments in ("--plan --lengths 64k --limit-memory 1MB", f"{data} --lengths 64 --limit-memory 100KB"):
        with pytest.raises(SystemExit):
            main(shlex.split(f"evaluate {tmp_path} {arguments}"))
        assert "32 tokens need about" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(shlex.split(f"evaluate {tmp_path} --plan --lengths 64k --limit-memory 1MB {data}"))
    assert "does not fit" in capsys.readouterr().out  # a plan that fails says which lengths fit


@pytest.mark.usefixtures("private_cache")
def test_an_evaluation_follows_the_plan(
    work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is logged before the weights are loaded, and the evaluation uses its chunk size."""
    model = str(work / "model")
    text = tmp_path / "long.txt"
    text.write_text(" ".join(path.read_text() for path in sorted((work / "data").glob("*.txt"))))
    limit = int(made(model, [1024]).longest.total / 0.95) - 1000
    planned = made(model, [1024], load_options=replace(CPU, limit_memory=limit)).longest.chunk_size
    assert planned < 1024
    seen: list[int] = []

    class Loaded(LoadOptions):
        def load(self, name: str, *, reserve: int = 0) -> torch.nn.Module:
            assert "plan: " in caplog.text
            lm: Any = super().load(name, reserve=reserve)
            lm.model.layers[0].register_forward_pre_hook(
                lambda _module, states: seen.append(states[0].shape[1])
            )
            return lm

    from rope_extend.evaluation.evaluation_config import EvaluationConfig
    from rope_extend.evaluation.measurement import Measurement
    from rope_extend.evaluation.running import run

    config = EvaluationConfig(model=model, data=str(text), lengths=[1024], methods=["linear"], cropped=False)
    options = Loaded(device="cpu", dtype=torch.float32, limit_memory=limit)
    monkeypatch.setattr(LoadOptions, "of", lambda _: options)
    with caplog.at_level(logging.INFO, "rope_extend"):
        run(Measurement(config), None, progress=False)
    trial = [sum(TRIAL_CHUNKS), *TRIAL_CHUNKS, *TRIAL_CHUNKS]
    assert seen == [*trial, *[planned] * (1024 // planned)]
