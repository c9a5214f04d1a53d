"""For any change to a checkpoint's files, its readers raise our error, or load what was saved."""

from __future__ import annotations

import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import llama
from covering import OPTIONS, few
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integrity import INDEX, logits
from tolerances import assert_same_but_rounding

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint import verifying
from rope_extend.checkpoint.card import model_card
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.record import read_record, write_record
from rope_extend.models.checkpoint_directory import RECORD_NAME

pytestmark = pytest.mark.filterwarnings("ignore")

FILES = {
    "full": ("config.json", RECORD_NAME, "model.safetensors"),
    "guarded": ("config.json", RECORD_NAME),
    "sharded": (INDEX, "model-00002-of-*.safetensors"),
    "adapter": ("adapter_config.json", RECORD_NAME, "adapter_model.safetensors", "../base/config.json"),
}
CASES = [(kind, name) for kind, names in FILES.items() for name in names]
SETTINGS = settings(
    max_examples=800 if OPTIONS.full else 20, deadline=None, suppress_health_check=list(HealthCheck),
    derandomize=not OPTIONS.full, database=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def expected(checkpoints: Path) -> dict[str, torch.Tensor]:
    return {kind: logits(rx.load(checkpoints / kind)) for kind in FILES}


def moved_base(directory: Path) -> dict[str, str]:
    return {"base_model": str(directory.parent / "base")} if directory.name == "adapter" else {}


def load_adapter(directory: Path, *, check_files: bool) -> Any:
    """Load an adapter on a loaded model; if it is refused, the model is unchanged."""
    model = llama()
    modules, before = dict(model.named_modules()), logits(model)
    try:
        return rx.load_adapter(model, directory, check_files=check_files)
    except RopeExtendError:
        assert dict(model.named_modules()) == modules
        assert rx.current_patch(model) is None
        assert torch.equal(logits(model), before)
        raise


def info(directory: Path, _: Path) -> None:
    assert math.isfinite(rx.info(str(directory)).shape.theta)


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda d, _: rx.load(d, **moved_base(d)),
    "load_adapter": lambda d, _: load_adapter(d, check_files=True),
    "merge": lambda d, out: rx.merge(d, out, **moved_base(d)),
    "export": lambda d, out: export(d, out, verify=False, **moved_base(d)),
    "unchecked load": lambda d, _: rx.load(d, check_files=False, check_base=False, **moved_base(d)) and None,
    "unchecked load_adapter": lambda d, _: load_adapter(d, check_files=False) and None,
    "read_record": lambda d, _: read_record(d) and None,
    "info": info,
    "card": lambda d, _: model_card(d) and None,
    "verify": lambda d, _: rx.verify(d, **moved_base(d)) and None,
}
"""The first four return a model or its directory. For a sealed checkpoint, it computes what was saved."""


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(), st.text(max_size=6),
    st.sampled_from([
        1e-30, 1e30, -0.0, "", "/etc/passwd", "../base", "\ud800", "a\0b", "x" * 300, "llama",
        "mistral", "gpt2", "yarn", "longrope", "rope_extend", "none", "float16", "int8", "LORA",
        "IA3", "pissa", ".*", "(", "all-linear",
    ]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)
HUGE = st.sampled_from([2**31, 2**63, 10**30, -(10**30), 1e308])
"""Not for configs: building a model of 2^31 layers would never end."""


def places(data: Any) -> list[tuple[Any, Any]]:
    """Each container in a JSON value, with every key or index in it."""
    found: list[tuple[Any, Any]] = []
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            found += [(data, key), *places(data[key])]
    return found


def changed_json(draw: Callable[[st.SearchStrategy[Any]], Any], text: str, *, huge: bool) -> bytes:
    """A JSON text with a value replaced, removed, added or moved, or with one character changed."""
    if draw(st.integers(0, 4)) == 0:
        raw = bytearray(text.encode())
        at = draw(st.integers(0, len(raw) - 1))
        if draw(st.booleans()):
            raw[at] ^= 1 << draw(st.integers(0, 7))
        else:
            del raw[at : at + draw(st.integers(1, 9))]
        return bytes(raw)
    data = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        container, key = draw(st.sampled_from(places(data)) if places(data) else st.just(([0], 0)))
        what = draw(st.sampled_from(["exchange", "exchange", "exchange", "omit", "add", "copy"]))
        if what == "omit":
            del container[key]
        elif what == "add" and isinstance(container, dict):
            container[draw(st.text(max_size=6))] = draw(VALUES)
        elif what == "copy":
            other, where = draw(st.sampled_from(places(data)))
            container[key] = json.loads(json.dumps(other[where]))
        else:
            container[key] = draw(VALUES | HUGE if huge else VALUES)
    return json.dumps(data).encode()


def changed_tensors(draw: Callable[[st.SearchStrategy[Any]], Any], raw: bytes) -> bytes:
    """A safetensors file with another header, or with bytes flipped, cut, added or replaced."""
    length = struct.unpack("<Q", raw[:8])[0]
    if draw(st.booleans()):
        header = changed_json(draw, raw[8 : 8 + length].decode(), huge=True)
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header + raw[8 + length :]
    data = bytearray(raw)
    at = draw(st.integers(0, len(data) - 1))
    what = draw(st.sampled_from(["flip", "flip", "cut", "add", "exchange", "length"]))
    if what == "flip":
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif what == "cut":
        del data[at : at + draw(st.integers(1, 2000))]
    elif what == "add":
        data[at:at] = draw(st.binary(min_size=1, max_size=20))
    elif what == "exchange":
        data[at : at + 4] = draw(st.binary(min_size=4, max_size=4))
    else:
        data[:8] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1)))
    return bytes(data)


@pytest.fixture(autouse=True)
def no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the part of verification in this process; other tests cover the other process."""
    monkeypatch.setattr(verifying, "_stock_logits", lambda *_, **__: "not read")


@pytest.mark.parametrize(("kind", "name"), few(CASES, 2))
@SETTINGS
@given(data=st.data())
def test_readers_know_damage_when_they_see_it(
    checkpoints: Path, expected: dict[str, torch.Tensor], kind: str, name: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as work:
        directory, output = Path(work) / kind, Path(work) / "output"
        shutil.copytree(checkpoints / kind, directory)
        shutil.copytree(checkpoints / "base", Path(work) / "base")
        # Without digests, other checks must find the fault.
        sealed = data.draw(st.booleans(), label="sealed")
        if not sealed:
            record = read_record(directory)
            write_record(directory, replace(record, weights={}, configs={}, base_fingerprint=None))
        path = next(directory.glob(name)) if "*" in name else directory / name
        before = path.read_bytes()
        if name.endswith("safetensors"):
            after = changed_tensors(data.draw, before)
        else:
            after = changed_json(data.draw, before.decode(), huge=name == RECORD_NAME)
        path.write_bytes(after)
        reader = data.draw(st.sampled_from(sorted(READERS)), label="reader")
        found = None
        try:
            found = READERS[reader](directory, output)
        except RopeExtendError:
            assert not output.exists()
        if found is not None and (sealed or reader == "merge"):
            found = rx.load(found) if isinstance(found, Path) else found
        if found is not None and sealed:
            assert_same_but_rounding(logits(found), expected[kind])
        assert path.read_bytes() == after
