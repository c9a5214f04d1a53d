"""Helpers of the tests that damage, mix up or interrupt checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.record import read_record, write_record
from rope_extend.models.checkpoint_directory import RECORD_NAME

IDS = torch.arange(TARGET).remainder(50)[None]
"""Each a token of every model of these tests: the smallest vocabulary has 50."""
RECORD, WEIGHTS, INDEX = RECORD_NAME, "model.safetensors", "model.safetensors.index.json"
KINDS = ("full", "sharded", "adapter")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """At every position up to the target length."""
    return model.eval()(IDS).logits.float()


def with_lora(model: Any, adapter_name: str = "default") -> Any:
    """Put an adapter with random weights on a model."""
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(model, config, adapter_name).eval()


def extended(method: str = "yarn", model: Any = None) -> Any:
    model = llama() if model is None else model
    rx.extend(model, TARGET, method)
    return model


def tuned(base: Path | str, method: str = "yarn") -> Any:
    """The model of a directory in float32, extended, with an adapter."""
    return with_lora(extended(method, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)))


def other_weights(model: Any) -> Any:
    """A model with one matrix changed, so that no adapter of it fits any more."""
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    return model


def each(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("directory", kinds or KINDS, indirect=True)


def named(directory: Path, name: str) -> Path:
    return weights_of(directory) if name == "weights" else directory / name


def contents(directory: Path) -> dict[str, Any]:
    """The contents of every file below a directory, and the target of every link."""
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def weights_of(directory: Path) -> Path:
    """One of the weight files of a directory."""
    return sorted([*directory.glob("model*.safetensors"), *directory.glob("adapter_model.safetensors")])[-1]


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0b1000
    path.write_bytes(data)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in the files of a full checkpoint."""
    return {k: v for path in directory.glob("model*.safetensors") for k, v in load_file(path).items()}


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda directory, _: rx.load(directory),
    "load_adapter": lambda directory, _: rx.load_adapter(llama(), directory),
    "merge": lambda directory, output: rx.merge(directory, output),
    "export": lambda directory, output: export(directory, output),
    "verify": lambda directory, _: rx.verify(directory),
}


def ways(directory: Path) -> list[str]:
    """The names of the functions that read a checkpoint of this kind."""
    adapter = directory.name == "adapter"
    return [name for name in WAYS if adapter or name not in ("load_adapter", "merge")]


def refused(directory: Path, message: str, *, by: str | None = None) -> None:
    """Check that every function that reads a directory raises one RopeExtendError and changes no file."""
    before = contents(directory)
    output = directory.parent / "output"
    for name in [by] if by else ways(directory):
        with pytest.raises(RopeExtendError, match=message) as error:
            WAYS[name](directory, output)
        assert "\n" not in str(error.value), name
        assert not output.exists(), name
        assert contents(directory) == before, name


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    changed = change(data)
    path.write_text(json.dumps(data if changed is None else changed))


def unsealed(directory: Path) -> Path:
    """Remove the digests from the record: a fault must then be found by other checks."""
    write_record(directory, replace(read_record(directory), weights={}, configs={}))
    return directory


_watched: Callable[[str, tuple[Any, ...]], None] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None:
        _watched(event, arguments)


sys.addaudithook(_hook)


@contextmanager
def watching(watch: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `watch` for every request of Python to the operating system; it may raise."""
    global _watched
    _watched = watch
    try:
        yield
    finally:
        _watched = None


def in_hub_cache(directory: Path, cache: Path, name: str) -> Path:
    """Copy a directory into a hub cache, as links from a snapshot to blobs; returns the snapshot."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / ("0" * 40)
    for part in (snapshot, root / "blobs", root / "refs"):
        part.mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    for number, path in enumerate(sorted(directory.iterdir())):
        blob = root / "blobs" / f"{number:064}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


STEPS = ("open", "os.mkdir", "os.rename", "os.link", "os.truncate")


class Fault:
    """Raises once, at the n-th write below a directory; `killed` is a copy of it as a kill would leave it."""

    def __init__(
        self, below: Path, number: int, error: BaseException, *, clearing: bool = False,
        killed: Path | None = None,
    ) -> None:  # fmt: skip
        self.below, self.number, self.error, self.killed = str(below.resolve()), number, error, killed
        self.steps = (*STEPS, "os.remove", "os.rmdir") if clearing else STEPS
        self.count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self.steps:
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if not any(
            isinstance(a, str | os.PathLike) and os.fspath(a).startswith(self.below) for a in arguments
        ):
            return
        self.count += 1
        if self.count == self.number:
            if self.killed is not None and os.path.exists(self.below):
                shutil.copytree(self.below, self.killed)
            raise self.error
