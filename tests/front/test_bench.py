"""The benchmarks run at a tiny size, and their deterministic rows meet their targets."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluator
import interpolation
import kernel_cost
import pytest
import remap_prefill
import run_benchmarks
import torch
import training_cost
from covering import few
from transformers import LlamaConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No repetitions and no warm-up: what these tests look at are counts of bytes and operations."""

    def timed(*functions: Callable[[], object], **_: object) -> list[float]:
        times = []
        for function in functions:
            begun = time.perf_counter()
            function()
            times.append(time.perf_counter() - begun)
        return times

    for module in (evaluator, training_cost):
        monkeypatch.setattr(module, "timed", timed)


def rows(benchmark: Any) -> dict[str, dict[str, Any]]:
    """The rows of a benchmark by name and peer, all with finite figures."""
    listed = list(benchmark)
    for row in listed:
        assert row["ours"] > 0 or row["unit"] == "nat"
        assert row["theirs"] is None or row["ratio"] == row["ours"] / row["theirs"]
    return {f"{row['name']} / {row['peer']}": row for row in listed}


def small(**sizes: int) -> LlamaConfig:
    """The shape of the models of benchmarks, small."""
    return LlamaConfig(
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 512, **sizes}
    )  # fmt: skip


BENCHMARKS: dict[str, tuple[Callable[[], Any], list[str], str, slice]] = {
    "memory of the evaluator": (
        lambda: evaluator.evaluator_memory(1, cases=[(2**15, 512, 1024, 1 / 10), (2**16, 256, 512, 1 / 20)]),
        ["B", "s", "B", "s"], "peak bytes", slice(2),
    ),
    "losses": (
        lambda: evaluator.evaluator_agreement(1, vocabulary=4096, length=256), ["nat", "nat"], "", slice(2),
    ),
    "a curve": (
        lambda: evaluator.whole_curve(1, window=8, count=64, reach=32), ["FLOP", "s", "s"], "FLOPs", slice(1),
    ),
    "a LoRA step": (
        lambda: training_cost.training_step(1, tokens=256, width=192), [*["s"] * 4, *["B"] * 6, "s"],
        "kept for backward", slice(-1, None),
    ),
    "packed documents": (
        lambda: training_cost.packed_documents(1, tokens=1024), ["s", "B"], "peak", slice(1),
    ),
    "kernels": (
        lambda: kernel_cost.attention_kernels(1, small(num_hidden_layers=1), lengths=(128, 256)), [],
        "float64", slice(3),
    ),
}  # fmt: skip
"""A benchmark at a tiny size, the units of its rows, and which of the rows with a word in their name have
counts that meet their target, or else are below the peer's, at any size."""


@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("name", few(BENCHMARKS, 3, 2))
def test_a_benchmark_runs_and_its_counts_meet_their_targets(name: str) -> None:
    benchmark, units, word, which = BENCHMARKS[name]
    found = rows(benchmark())
    assert not units or [row["unit"] for row in found.values()] == units
    counted = [row for name, row in found.items() if word in name][which]
    assert len(counted) == (which.stop or 1)
    assert all(row["ratio"] <= (row["target"] or 1) for row in counted)


def test_the_benchmark_for_a_gpu_runs_at_a_small_shape() -> None:
    found = rows(evaluator.evaluator_8b(2, config=small(), lengths=(256, 512), device="cpu"))
    assert [row["unit"] for row in found.values()] == ["s", "B", "s", "B", "s"]
    plan = found["small model, bfloat16: peak memory at 256 tokens / the plan"]
    assert plan["ratio"] <= plan["target"]
    assert "small model, bfloat16: time of a curve of 64 lengths at 256 tokens / 16 s" in found
    memory = found["small model, bfloat16: peak memory besides the weights at 256 tokens / 20 GB"]["ours"]
    assert 2 * 64 * 256 < memory < 2**24  # more than the hidden states, in bfloat16


@pytest.mark.slow
def test_the_training_benchmark_for_a_gpu_runs_at_a_small_shape() -> None:
    config = small(intermediate_size=256)
    found = list(training_cost.training_8b(1, config=config, tokens=256, device="cpu", limit=6e6, tile=64))
    assert [row["unit"] for row in found] == ["tokens", "tokens", "s"]
    longest, plan, overhead = found
    assert longest["name"] == "small model, bfloat16 LoRA: longest window that trains"
    assert longest["ours"] > 1.5 * longest["theirs"] > 0
    assert 0.9 <= plan["ratio"] <= 1  # ours is searched downwards from the plan
    assert overhead["target"] == 1.03


def test_without_a_gpu_rows_say_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "rows.jsonl"
    for _ in range(2):  # the second time, it shows what is kept
        assert run_benchmarks.main(["evaluator-8b", "training-8b", "--output", str(output)]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        assert len(lines) == 5
        assert all("not measured" in line and "yet" in line for line in lines)
    made = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["ours"] for row in made] == [None] * 5
    assert "8B model, bfloat16: time at 262,144 tokens" in made[2]["name"]
    assert "8B model, bfloat16 LoRA: longest window that trains" in made[3]["name"]
    for wrong in (["whole-curve", "--device", "cuda"], ["nothing"]):
        with pytest.raises(SystemExit):
            run_benchmarks.main([*wrong, "--output", str(tmp_path / "other.jsonl")])
    said = capsys.readouterr().err
    assert "no CUDA device; use --device cpu" in said
    assert "invalid choice: 'nothing'" in said


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_the_interpolation_curve_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    changes = {"eval_every": 1, "eval_documents": 1, "max_documents": 4, "batch_size": 1, "warmup_steps": 0}
    found = list(interpolation.interpolation_curve(1, steps=2, **changes))
    after, until, before, _, direct = found
    assert "after 2 steps" in after["name"]
    assert before["ours"] > after["theirs"]  # untrained, interpolation is far above the base model
    assert after["ours"] < before["ours"]
    assert after["theirs"] < before["theirs"]  # and without it the model is lost beyond its window
    assert until["ours"] in (1, 2, math.inf)
    assert direct["ours"] == after["ours"]


@pytest.mark.slow
def test_memory_of_a_prefill_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remap_prefill, "timed", lambda *functions, **_: [1.0 for _ in functions])
    monkeypatch.setattr(remap_prefill, "METHODS", ("rerope", "dual_chunk"))
    monkeypatch.setattr(remap_prefill, "naive_attention", lambda repetitions: [])
    found = rows(remap_prefill.changed_positions_prefill(1, lengths=(2304, 4608), longest=None))
    exponents = [row for name, row in found.items() if "exponent" in name]
    assert len(found) == 8
    assert len(exponents) == 2
    assert all(row["ours"] < 1.1 for row in exponents)
