"""One table of files that are damaged, exchanged or hostile: each reader refuses them and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from integrity import (
    INDEX,
    KINDS,
    RECORD,
    each,
    flip,
    named,
    refused,
    rewritten,
    unsealed,
    watching,
    weights_of,
)
from safetensors.torch import load_file, save_file

from rope_extend.checkpoint.record import read_record, write_record_with_digests

CONFIGS = {"full": ["config.json"], "sharded": ["config.json", INDEX], "adapter": ["adapter_config.json"]}
JSON = [(kind, name) for kind in KINDS for name in (*CONFIGS[kind], RECORD)]
FILES = [*JSON, *((kind, "weights") for kind in KINDS)]


def written(name: str, text: bytes, directory: Path) -> None:
    (directory / name).write_bytes(text)


def updated(name: str, change: dict[str, Any], directory: Path) -> None:
    rewritten(directory / name, lambda data: {**data, **change})


def listed(key: str, name: str, directory: Path) -> None:
    (directory.parent / "secret.safetensors").write_bytes(b"secret")
    rewritten(directory / RECORD, lambda data: data[key].update({name: "0" * 64}))


def indexed(name: Any, unseal: bool, directory: Path) -> None:
    shutil.copy(weights_of(directory), directory.parent / "secret.safetensors")
    rewritten(
        directory / INDEX, lambda data: data["weight_map"].update({next(iter(data["weight_map"])): name})
    )
    if unseal:
        unsealed(directory)


def cut(keep: float | None, directory: Path) -> None:
    data = weights_of(directory).read_bytes()
    length = int(len(data) * keep if keep and 0 < keep < 1 else keep or 0)
    weights_of(directory).write_bytes(data + bytes(8) if keep is None else data[:length])


def flipped(where: float, directory: Path) -> None:
    data = weights_of(directory).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    flip(weights_of(directory), start + int(where * (len(data) - 1 - start)))


def exchanged(change: str, directory: Path) -> None:
    path = weights_of(directory)
    if change == "missing":
        path.unlink()
    elif change == "added":
        shutil.copy(path, directory / "model-00009-of-00009.safetensors")
    elif change == "renamed":
        path.rename(directory / f"model-old-{path.name}")
    else:
        tensors = load_file(path)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def not_finite(dtype: torch.dtype, value: float, directory: Path) -> None:
    tensors = load_file(weights_of(directory))
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] = value
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, weights_of(directory), metadata={"format": "pt"})
    write_record_with_digests(directory, read_record(directory))  # with digests that agree


def linked_outside(name: str, directory: Path) -> None:
    path, outside = named(directory, name), directory.parent / "outside"
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def no_file(name: str, what: str, directory: Path) -> None:
    path = named(directory, name)
    path.unlink()
    if what == "circle":
        path.symlink_to(path.with_name("other"))
        path.with_name("other").symlink_to(path)
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)  # reading it would block


def megatron(change: dict[str, Any], directory: Path) -> None:
    """Versions of peft import `megatron_core` if there is a `megatron_config`."""
    updated("adapter_config.json", change, directory)
    unsealed(directory)


TEXTS = (b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"a": ' * 5000)
SCHEMAS = (0, 1, 3, 99, -1, "2", 2.0, None, True, [2], {})
AGREED = {"target_length": 64, "encoding": {"name": "linear", "factor": 8.0}}
ELSEWHERE = ("../secret.safetensors", "/etc/passwd", "a\0b", "\ud800")
ESCAPES = (
    "../secret.safetensors", "/etc/secret.safetensors", "sub/secret.safetensors", "..\\secret.safetensors",
    "C:secret.safetensors", "./secret.safetensors", "secret.safetensors/", "..", "", "model.bin",
    "a\0.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors", None, 5, ["model.safetensors"], {},
)  # fmt: skip
PICKLES = ("pytorch_model.bin", "adapter_model.bin", "model.pt", "MODEL.PTH", "x.ckpt", "x.pkl", "x.pickle")
VALUES = product((torch.float32, torch.float16, torch.bfloat16, torch.float64), ("nan", "inf", "-inf"))
TWO = ("full", "adapter")
TABLE: list[tuple[str, Callable[[Path], None], str]] = [
    *((k, partial(written, n, text), n) for (k, n), text in product(JSON, TEXTS)),
    *((k, partial(updated, RECORD, {"schema_version": v}), "schema_version is .* reads 2; a newer one may")
      for k, v in product(TWO, SCHEMAS)),
    *((k, partial(updated, RECORD, {key: v}), rf"not agree with .* {key} .*One of the two is")
      for k, (key, v) in product(TWO, AGREED.items())),
    *((k, partial(listed, key, n), "is missing, according to the digests in")
      for k, key, n in product(TWO, ("weights", "configs"), ELSEWHERE)),
    *(("sharded", partial(indexed, n, unseal),
       "which is not a safetensors file of this directory|is missing or cannot be")
      for n, unseal in product(ESCAPES, (False, True))),
    *((k, partial(cut, keep), "safetensors is truncated or damaged")
      for k, keep in product(KINDS, (0, 7, 8, 100, 0.5, -1, None))),
    *((k, partial(flipped, at), "weight file '.*' in .* is not what was saved")
      for k, at in product(KINDS, (0.0, 0.5, 1.0))),
    *((k, partial(exchanged, how), "is missing|holds no|was added later|is not what was saved")
      for k, how in product(KINDS, ("missing", "added", "exchanged", "renamed"))),
    *((k, partial(written, n, b"\x80\x04."), rf"{n} is a pickle") for k, n in product(KINDS, PICKLES)),
    *((k, partial(not_finite, dtype, float(value)), "holds values that are NaN or infinite")
      for k, (dtype, value) in product(TWO, [*VALUES, (torch.float8_e4m3fn, "nan")])),
    *((k, partial(linked_outside, n), "outside the checkpoint, and is not read") for k, n in FILES),
    *((k, partial(no_file, n, what),
       f"{'safetensors' if n == 'weights' else n}.* (is missing or cannot be|is not a regular)|no {RECORD} in"
       "|cannot read")
      for (k, n), what in product(FILES, ("circle", "dangling", "directory", "pipe"))),
    *(("adapter", partial(megatron, change), "is for Megatron and names the module .* refused")
      for change in ({"megatron_config": {}}, {"megatron_core": "hostile"})),
]  # fmt: skip


def described(value: Any) -> str:
    if isinstance(value, partial):
        return f"{value.func.__name__} {', '.join(repr(each)[:30] for each in value.args)}"
    return value if value in KINDS else ""


@pytest.mark.parametrize(("directory", "change", "message"), TABLE, indirect=["directory"], ids=described)
def test_it_is_refused(directory: Path, change: Callable[[Path], None], message: str) -> None:
    change(directory)
    opened: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            opened.append(str(arguments[0]))

    with watching(watch):
        refused(directory, message)
    assert not [path for path in opened if "secret" in path]


@each("full")
def test_a_link_that_leads_elsewhere_is_not_exported(directory: Path) -> None:
    """An export may be published, so it must not contain other files."""
    (directory / "notes.txt").write_text("secret")
    linked_outside("notes.txt", directory)
    refused(directory, "outside the checkpoint, and is not read", by="export")
