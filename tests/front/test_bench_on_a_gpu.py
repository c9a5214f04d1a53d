"""The benchmarks start on a GPU as they should, shown without one."""

from __future__ import annotations

import sys

import measuring
import pytest
import run_benchmarks
import torch


def test_segments_grow_before_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: calls.append("name") or "a GPU")
    monkeypatch.setattr(run_benchmarks, "expand_segments", lambda setting: calls.append(setting))
    monkeypatch.setattr(run_benchmarks, "BENCHMARKS", {"none": lambda repetitions: iter(())})
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", "none"])
    run_benchmarks.main()
    assert calls == ["auto", "name"]
    assert measuring.device_name() == "a GPU"
