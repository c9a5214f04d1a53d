"""Damage, mix-ups and interruptions: one clear error, and what was there before is there afterwards."""

from __future__ import annotations

import ast
import errno
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, TRAINED, llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint import RECORD_NAME, read_record, seal, verifying, write_record
from rope_extend.checkpoint.card import write_card
from rope_extend.checkpoint.exporting import export
from rope_extend.cli import main

IDS = torch.arange(80).remainder(61)[None]
RECORD, WEIGHTS, INDEX = RECORD_NAME, "model.safetensors", "model.safetensors.index.json"
KINDS = ("full", "sharded", "adapter")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


def extended(method: str = "yarn", model: Any = None) -> Any:
    model = llama() if model is None else model
    rx.extend(model, TARGET, method)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and on it `full`, `sharded` and `adapter`."""
    where = tmp_path_factory.mktemp("made")
    llama().save_pretrained(where / "base")
    rx.save(extended(), where / "full")
    rx.save(extended(), where / "sharded", max_shard_size="20KB")
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(where / "base")))
    rx.save(adapted, where / "adapter")
    return where


@pytest.fixture
def directory(made: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one of them, that may be damaged."""
    return Path(shutil.copytree(made / request.param, tmp_path / request.param))


def each(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("directory", kinds or KINDS, indirect=True)


def each_with(*files: str) -> pytest.MarkDecorator:
    """Those of `files` that there are, with each kind of directory; `weights` for one of its weights."""
    there = {"full": {"config.json"}, "sharded": {"config.json", INDEX}, "adapter": {"adapter_config.json"}}
    pairs = [(k, f) for k in KINDS for f in files if f in ("weights", RECORD, *there[k])]
    return pytest.mark.parametrize(("directory", "name"), pairs, indirect=["directory"])


def named(directory: Path, name: str) -> Path:
    return weights_of(directory) if name == "weights" else directory / name


def contents(directory: Path) -> dict[str, Any]:
    """Every file below a directory, and every link as a link."""
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def weights_of(directory: Path) -> Path:
    """A file of weights in it."""
    return sorted([*directory.glob("model*.safetensors"), *directory.glob("adapter_model.safetensors")])[-1]


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda directory, _: rx.load(directory),
    "load_adapter": lambda directory, _: rx.load_adapter(llama(), directory),
    "merge": lambda directory, output: rx.merge(directory, output),
    "export": lambda directory, output: export(directory, output),
    "verify": lambda directory, _: rx.verify(directory),
}


def ways(directory: Path) -> list[str]:
    """The ways by which a checkpoint of its kind is read."""
    adapter = directory.name == "adapter"
    return [name for name in WAYS if adapter or name not in ("load_adapter", "merge")]


def refused(directory: Path, message: str, *, by: str | None = None) -> None:
    """Every way of reading a directory ends in one RopeExtendError, and leaves all as it was."""
    before = contents(directory)
    output = directory.parent / "output"
    for name in [by] if by else ways(directory):
        with pytest.raises(RopeExtendError, match=message) as error:
            WAYS[name](directory, output)
        assert "\n" not in str(error.value), name
        assert not output.exists(), name
        assert contents(directory) == before, name


# --------------------------------------------------------------------------------------------- the weights


@each()
@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, -1], ids=str)
def test_a_truncated_file_is_refused(directory: Path, keep: float) -> None:
    path = weights_of(directory)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)] if 0 < keep < 1 else data[: int(keep)])
    refused(directory, rf"{path.name} is truncated or damaged")


@each()
def test_bytes_behind_the_end_are_refused(directory: Path) -> None:
    with weights_of(directory).open("ab") as file:
        file.write(b"\0" * 8)
    refused(directory, "is truncated or damaged")


@each()
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_flipped_bit_of_data_is_refused_here_and_read_without_a_word_elsewhere(
    directory: Path, where: float
) -> None:
    path = weights_of(directory)
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int(where * (len(data) - 1 - start))] ^= 0b1000
    path.write_bytes(data)
    AutoModelForCausalLM.from_pretrained(directory)  # what the manifest is for
    refused(directory, rf"weight file '{path.name}' in .* is not what was saved")


@each("full", "adapter")
def test_a_flipped_bit_of_the_header_is_refused(directory: Path) -> None:
    """Whichever it is: of its length, of a name, a type, a shape or an offset."""
    path = weights_of(directory)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for bit in range(0, 8 * start, 37):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        with pytest.raises(RopeExtendError, match=rf"{path.name}.* is (truncated or damaged|not what was)"):
            rx.load(directory)
    path.write_bytes(data)
    rx.load(directory)


@each()
@pytest.mark.parametrize("change", ["missing", "added", "exchanged", "renamed"])
def test_files_that_are_not_those_that_were_saved_are_refused(directory: Path, change: str) -> None:
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
    refused(directory, "is missing|holds no|was added later|is not what was saved")


@each()
@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "adapter_model.bin", "model.pt", "MODEL.PTH", "x.ckpt", "x.pkl", "x.pickle"],
)
def test_pickles_are_refused(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"\x80\x04.")
    refused(directory, rf"{name} is a pickle")


@each("full", "adapter")
def test_the_state_of_a_training_run_is_not_taken_for_weights(directory: Path) -> None:
    expected = logits(rx.load(directory))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt"):
        (directory / name).write_bytes(b"\x80\x04.")
    assert torch.equal(logits(rx.load(directory)), expected)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@each("full", "adapter")
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float8_e4m3fn, float("nan")), *itertools.product(DTYPES, map(float, ("nan", "inf", "-inf")))],
    ids=str,
)
def test_weights_that_are_not_finite_are_refused_when_they_are_read(
    directory: Path, dtype: torch.dtype, value: float
) -> None:
    path = weights_of(directory)
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] = value
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    seal(directory, read_record(directory))  # as one that was saved by other means, or is new
    refused(directory, rf"{name} holds values that are NaN or infinite")


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_weights_that_are_not_finite_are_not_saved(made: Path, tmp_path: Path, value: float) -> None:
    full = extended()
    full.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(made / "base")))
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data[1, 1] = value
    for model, name in ((full, "model.layers.1.mlp.up_proj"), (adapted, "q_proj.lora_B.weight")):
        with pytest.raises(RopeExtendError, match=rf"{name}.* holds values that are NaN or infinite"):
            rx.save(model, tmp_path / "a" / "new")
        assert list(tmp_path.iterdir()) == []  # nor is a parent directory left behind


# -------------------------------------------------------------------------------------- another base model


def test_a_base_model_that_was_exchanged_under_its_name_is_refused(made: Path, tmp_path: Path) -> None:
    where = Path(shutil.copytree(made, tmp_path / "there"))
    adapter = where / "adapter"
    write_record(adapter, replace(read_record(adapter), base_model=str(where / "base")))
    expected = logits(rx.load(made / "adapter"))
    assert torch.equal(logits(rx.load(adapter)), expected)
    other = llama()
    other.model.layers[0].mlp.gate_proj.weight.data.mul_(1.5)
    other.save_pretrained(where / "base")
    for name in ("load", "merge", "export", "verify"):
        refused(adapter, r"was trained on .* has other weights", by=name)
    assert not torch.equal(logits(rx.load(adapter, check_base=False)), expected)


@pytest.mark.parametrize("init", ["pissa", "olora", "gaussian"])
def test_an_adapter_that_changes_its_base_model_is_put_on_the_unchanged_one(
    made: Path, tmp_path: Path, init: str
) -> None:
    """peft takes out of the base model's weights what it puts into such adapters, on loading too."""
    model = extended(model=AutoModelForCausalLM.from_pretrained(made / "base"))
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=init)
    model = get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.add_(0.1 * torch.randn_like(weight))
    adapter, expected = rx.save(model, tmp_path / "adapter"), logits(model)
    torch.testing.assert_close(logits(rx.load(adapter)), expected, rtol=0, atol=1e-5)
    if init != "gaussian":
        refused(adapter, rf"\({init}\), so that it cannot be merged from the files.*in_memory", by="merge")
    merged = rx.merge(adapter, tmp_path / "merged", in_memory=init != "gaussian")
    torch.testing.assert_close(logits(rx.load(merged)), expected, rtol=0, atol=1e-4)
    # A refusal comes after peft has changed the weights; they are put back.
    other = llama()
    other.model.layers[0].self_attn.q_proj.weight.data.mul_(1.5)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(RopeExtendError, match="has other weights"):
        rx.load_adapter(other, adapter)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_base_model_may_be_in_another_precision(made: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    rx.load(made / "adapter", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(made / "base", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    # Where the base is rounded on disk, it is the same base to what it is compared by.
    rx.load(made / "adapter", base_model=str(tmp_path / "half"), dtype=dtype)


def test_a_base_model_in_float16_is_compared_as_far_as_that_goes(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unchecked = "so that it cannot be checked which base model an adapter belongs to"
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(made / "base", dtype=torch.float16).save_pretrained(half)
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)))
    adapter = rx.save(adapted, tmp_path / "adapter")
    # Where the base model itself is in float16, it is known in whatever it is loaded.
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rx.load(adapter, dtype=dtype)
    rx.merge(adapter, tmp_path / "merged")
    assert unchecked not in caplog.text
    # One that was rounded to it may be the right one; a merge wants the original.
    rx.load(made / "adapter", base_model=str(half), dtype=torch.float16)
    assert caplog.text.count(unchecked) == 1
    with pytest.raises(RopeExtendError, match=r"has other weights .*or the same rounded to float16"):
        rx.merge(made / "adapter", tmp_path / "other", base_model=str(half))
    other = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float16)
    other.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    other.save_pretrained(half)
    refused(adapter, "has other weights", by="merge")
    with pytest.raises(RopeExtendError, match="has other weights"):
        rx.load(adapter, dtype=torch.float32)


# ------------------------------------------------------------------------------------------------- configs


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    data = json.loads(path.read_text())
    changed = change(data)
    path.write_text(json.dumps(data if changed is None else changed))


def unsealed(directory: Path) -> Path:
    """As schema 1 wrote it: without digests, so that what is wrong has to be found otherwise."""
    write_record(directory, replace(read_record(directory), weights={}, configs={}))
    return directory


@each("full")
@pytest.mark.parametrize(
    "key",
    ["rope_parameters", "max_position_embeddings", "hidden_size", "num_hidden_layers", "vocab_size",
     "num_attention_heads", "head_dim", "intermediate_size", "model_type"],
)  # fmt: skip
def test_a_config_without_a_key_is_refused(directory: Path, key: str) -> None:
    rewritten(directory / "config.json", lambda data: {**{k: v for k, v in data.items() if k != key}})
    refused(directory, r"config 'config.json' .* is not what was saved")
    unsealed(directory)
    if key in (
        "rope_parameters",
        "max_position_embeddings",
        "head_dim",
    ):  # which the record has, or a default
        assert torch.equal(logits(rx.load(directory)), logits(extended()))
        return
    refused(directory, "", by="load")


@each("full")
def test_a_config_without_theta_is_refused(directory: Path) -> None:
    def without(data: dict[str, Any]) -> None:
        del data["rope_parameters"]["rope_theta"]

    rewritten(directory / "config.json", without)
    refused(directory, r"config 'config.json' .* is not what was saved")


def test_a_base_model_without_theta_is_refused(tmp_path: Path) -> None:
    """transformers fills in 10,000 without a word, which is not what this one was pretrained with."""
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    llama(**theta).save_pretrained(tmp_path / "base")
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
    adapter = rx.save(adapted, tmp_path / "adapter")
    rx.load(adapter)
    rewritten(
        tmp_path / "base" / "config.json", lambda data: data["rope_parameters"].pop("rope_theta") and None
    )
    for name in ("load", "merge", "export", "verify"):
        refused(adapter, r"rope_theta|theta=500000.0.*this one has", by=name)


@each_with("config.json", "adapter_config.json", RECORD, INDEX)
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"a": ' * 5000], ids=str)
def test_json_that_is_damaged_is_refused(directory: Path, name: str, text: bytes) -> None:
    (directory / name).write_bytes(text)
    refused(directory, name)


@each("full", "adapter")
@pytest.mark.parametrize("version", [0, 3, 99, -1, "2", 2.0, None, True, [2], {}], ids=repr)
def test_an_unknown_schema_is_refused(directory: Path, version: Any) -> None:
    rewritten(directory / RECORD, lambda data: {**data, "schema_version": version})
    refused(directory, r"schema_version is .* reads 1, 2; a newer one may have written it")


# --------------------------------------------------------------------------------------- paths that escape

_watched: Callable[[str, tuple[Any, ...]], None] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None:
        _watched(event, arguments)


sys.addaudithook(_hook)


@contextmanager
def watching(watch: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `watch` for whatever Python asks of the operating system; it may raise."""
    global _watched
    _watched = watch
    try:
        yield
    finally:
        _watched = None


ESCAPES = [
    "../secret.safetensors", "/etc/secret.safetensors", "sub/secret.safetensors", "..\\secret.safetensors",
    "C:secret.safetensors", "./secret.safetensors", "secret.safetensors/", "..", "", "model.bin",
    "a\0.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors", None, 5, ["model.safetensors"], {},
]  # fmt: skip


@each("sharded")
@pytest.mark.parametrize("name", ESCAPES, ids=lambda name: repr(name)[:20])
def test_an_index_that_leads_elsewhere_is_refused(directory: Path, name: Any) -> None:
    secret = directory.parent / "secret.safetensors"
    shutil.copy(weights_of(directory), secret)
    rewritten(
        directory / INDEX, lambda data: data["weight_map"].update({next(iter(data["weight_map"])): name})
    )
    opened: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            opened.append(str(arguments[0]))

    for unseal in (False, True):
        if unseal:
            unsealed(directory)
        with watching(watch):
            refused(
                directory, r"names .* which is no safetensors file of this directory|is missing or cannot be"
            )
    assert not [path for path in opened if "secret" in path]


@each("full", "adapter")
@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a\0b", "\ud800"], ids=repr)
@pytest.mark.parametrize("key", ["weights", "configs"])
def test_a_record_that_leads_elsewhere_is_refused(directory: Path, name: str, key: str) -> None:
    (directory.parent / "secret.safetensors").write_bytes(b"secret")
    rewritten(directory / RECORD, lambda data: data[key].update({name: "0" * 64}))
    refused(directory, "is missing, by the digests in")


def led_outside(path: Path) -> None:
    """Replace a file by a link to where it is now, beside the directory."""
    outside = path.parent.parent / "outside"
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


@each_with("weights", "config.json", "adapter_config.json", RECORD, INDEX)
def test_a_link_that_leads_elsewhere_is_refused(directory: Path, name: str) -> None:
    led_outside(named(directory, name))
    refused(directory, "outside the checkpoint, and is not read")


@each("full")
def test_a_link_that_leads_elsewhere_is_not_exported(directory: Path) -> None:
    """An export is made to be published."""
    (directory / "notes.txt").write_text("secret")
    led_outside(directory / "notes.txt")
    refused(directory, "outside the checkpoint, and is not read", by="export")


@each_with("weights", RECORD, "config.json", "adapter_config.json", INDEX)
@pytest.mark.parametrize("kind", ["circle", "dangling", "directory", "pipe"])
def test_what_is_no_file_is_refused(directory: Path, kind: str, name: str) -> None:
    path = named(directory, name)
    path.unlink()
    if kind == "circle":
        path.symlink_to(path.with_name("other"))
        path.with_name("other").symlink_to(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)  # reading it would wait for ever
    refused(directory, f"{path.name}.* (is missing or cannot be|is not a regular)|no {RECORD} in|cannot read")


@each()
def test_links_inside_the_directory_are_followed(directory: Path) -> None:
    expected = logits(rx.load(directory))
    (directory / "blobs").mkdir()
    for path in [path for path in directory.iterdir() if path.is_file()]:
        path.rename(directory / "blobs" / path.name)
        path.symlink_to(Path("blobs") / path.name)
    assert torch.equal(logits(rx.load(directory)), expected)
    output = export(directory, directory.parent / "output", verify=False)
    torch.testing.assert_close(logits(rx.load(output)), expected, rtol=0, atol=2e-4)


@each()
def test_a_directory_may_itself_be_a_link(directory: Path) -> None:
    link = directory.parent / "link"
    link.symlink_to(directory, target_is_directory=True)
    assert torch.equal(logits(rx.load(link)), logits(rx.load(directory)))
    rx.save(extended("linear"), link, overwrite=True)
    assert link.is_symlink()
    assert read_record(directory).encoding.name == "linear"


def in_hub_cache(directory: Path, cache: Path, name: str) -> Path:
    """A directory as `huggingface_hub` keeps it: links to blobs beside the snapshot; returns the snapshot."""
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


@each()
def test_a_checkpoint_in_the_hub_s_cache_is_read_by_path_and_by_name(
    directory: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = in_hub_cache(directory, cache, "org/name")
    expected = logits(rx.load(directory))
    for name in (snapshot, "org/name"):
        assert torch.equal(logits(rx.load(name)), expected)
    if directory.name == "adapter":
        base = AutoModelForCausalLM.from_pretrained(made / "base")
        assert torch.equal(logits(rx.load_adapter(base, "org/name")), expected)
        rx.merge("org/name", tmp_path / "merged")
    export("org/name", tmp_path / "output", verify=False)
    # But a link from there to anywhere else is not followed.
    path = snapshot / weights_of(directory).name
    path.unlink()
    path.symlink_to(weights_of(directory))
    with pytest.raises(RopeExtendError, match="outside the checkpoint"):
        rx.load("org/name")


def test_a_name_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    for name in ("org/nothing", tmp_path / "nothing", "", "a\0b", "\ud800", "x" * 5000, "../.."):
        for read in (
            rx.load,
            lambda name: rx.load_adapter(llama(), name),
            lambda name: rx.merge(name, tmp_path),
        ):
            with pytest.raises(RopeExtendError):
                read(name)
    assert list(tmp_path.iterdir()) == []


def test_a_guarded_checkpoint_is_checked_by_the_auto_class_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    rx.patch_model(model, rx.encoding("xpos"), target_length=TARGET)
    directory = rx.save(model, tmp_path / "full")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(directory)), logits(model))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    in_hub_cache(directory, tmp_path / "cache", "org/name")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("org/name")), logits(model))
    data = bytearray((directory / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (directory / WEIGHTS).write_bytes(data)
    with pytest.raises(RopeExtendError, match="is not what was saved"):
        AutoModelForCausalLM.from_pretrained(directory)


# --------------------------------------------------------------------------------------------- odd names

ODD = [
    "two words", " leading", "trailing ", "tab\there", "line\nbreak", "über-模型-🪢", "[a-z]*?", "{brace}",
    "'single'", '"double"', "back\\slash", "$HOME", "%41", "#hash", "-dash", "...", "~", "a" * 200, "c:d",
    "e\u0301",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_directory_may_have_any_name(made: Path, tmp_path: Path, name: str) -> None:
    where = tmp_path / name
    base = Path(shutil.copytree(made / "base", where / f"base {name}"))
    model = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(base)))
    expected = logits(model)
    adapter = rx.save(model, where / name)
    assert torch.equal(logits(rx.load(adapter)), expected)
    assert torch.equal(logits(rx.load_adapter(AutoModelForCausalLM.from_pretrained(base), adapter)), expected)
    assert rx.info(str(adapter)).encoding == "yarn(factor=8)"
    merged = rx.merge(adapter, where / f"merged {name}")
    torch.testing.assert_close(logits(rx.load(merged)), expected, rtol=0, atol=1e-4)
    output = export(merged, where / f"out {name}", verify=False)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(output)), expected, rtol=0, atol=2e-4
    )
    rx.save(model, adapter, overwrite=True)
    assert torch.equal(logits(rx.load(adapter)), expected)


def test_the_card_of_an_oddly_named_directory_has_lines_that_run(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = 'it\'s "odd"\n[x] $(y) 模型'
    shutil.copytree(made / "adapter", name)
    card = write_card(name)
    assert card is not None
    text = card.read_text(encoding="utf-8")
    python = text.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(compile(python, "card", "exec"), scope)
    assert torch.equal(logits(scope["model"]), logits(rx.load(made / "adapter")))
    bash = text.split("```bash\n")[1].split("```")[0]
    listed = subprocess.run(
        ["bash", "-c", f'rope-extend() {{ printf "%s|" "$@"; }}\n{bash}'],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    merged = f"{name}-merged"
    assert listed == "|".join(["merge", name, "--output", merged, "verify", merged, ""])


def test_an_oddly_named_directory_is_verified(made: Path, tmp_path: Path) -> None:
    """Through another process."""
    directory = Path(shutil.copytree(made / "full", tmp_path / 'it\'s "odd"\n[x] $(y) 模型'))
    assert rx.verify(directory).verdict == "equal"


def test_a_name_that_the_libraries_cannot_read_is_refused(tmp_path: Path) -> None:
    """Not UTF-8: safetensors cannot open such a file."""
    where = Path(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe"))
    try:
        where.mkdir()
    except OSError:
        pytest.skip("this file system takes no such name")
    with pytest.raises(RopeExtendError, match="cannot save to"):
        rx.save(extended(), where)
    assert list(where.iterdir()) == []


# ------------------------------------------------------------------------------------- disks that say no


@each()
def test_a_file_where_the_directory_should_be_is_refused(directory: Path) -> None:
    path = directory.parent / "file"
    path.write_bytes(b"mine")
    for where in (path, path / "below"):
        with pytest.raises(RopeExtendError, match=r"cannot (save to|read)"):
            rx.save(rx.load(directory), where)
        if directory.name == "adapter":
            with pytest.raises(RopeExtendError, match=r"cannot (save to|read)"):
                rx.merge(directory, where)
        with pytest.raises(RopeExtendError, match=r"cannot (save to|read)"):
            export(directory, where, verify=False)
    assert path.read_bytes() == b"mine"


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A directory, in a process for which permissions bind: as root they do not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)


@contextmanager
def privileged() -> Iterator[None]:
    """As before `unprivileged`."""
    effective = os.geteuid()
    os.seteuid(os.getuid())
    try:
        yield
    finally:
        os.seteuid(effective)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="this system has no permissions of this kind")
@each("full", "adapter")
def test_a_read_only_directory_is_refused(directory: Path) -> None:
    other = extended("linear")
    with unprivileged() as place:
        there, empty = place / "there", place / "empty"
        with privileged():
            shutil.copytree(directory, there)
            empty.mkdir()
            for path in (*there.iterdir(), there, empty):
                path.chmod(0o555 if path.is_dir() else 0o444)
        before = contents(there)
        for where in (there, empty, empty / "new"):
            with pytest.raises(RopeExtendError, match=r"cannot save to .*denied.* before is intact"):
                rx.save(other, where, overwrite=True)
        with pytest.raises(RopeExtendError, match=r"cannot write .*README.md: .*denied"):
            write_card(there)
        with pytest.raises(RopeExtendError, match=r"cannot write .*rope_extend.json: .*denied"):
            write_record(empty, read_record(there))
        assert contents(there) == before
        assert list(empty.iterdir()) == []
        with privileged():
            there.chmod(0o755)
            empty.chmod(0o755)


def test_a_verdict_that_cannot_be_written_is_an_error(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(made / "full", tmp_path / "full"))
    (directory / "verification.json").mkdir()
    monkeypatch.setattr(verifying, "_fresh", lambda *_, **__: (["not read"], {}))
    with pytest.raises(RopeExtendError, match=r"cannot write .*verification.json"):
        rx.verify(directory)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(RopeExtendError, match="the verifying process cannot be run"):
        rx.verify(directory)


STEPS = ("open", "os.mkdir", "os.rename", "os.link", "os.truncate")


class Fault:
    """Raises once, at the n-th step by which something is written below a directory."""

    def __init__(self, below: Path, number: int, error: BaseException, *, clearing: bool = False) -> None:
        self.below, self.number, self.error = str(below.resolve()), number, error
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
            raise self.error


def writes(kind: str, made: Path) -> Callable[[Path], Any]:
    """Something that replaces what is in a directory."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    if kind == "full":
        model = extended("linear")
        return lambda target: rx.save(model, target, tokenizer, overwrite=True, max_shard_size="50KB")
    if kind == "adapter":
        adapted = with_lora(extended("linear", AutoModelForCausalLM.from_pretrained(made / "base")))
        return lambda target: rx.save(adapted, target, overwrite=True)
    if kind == "merge":
        return lambda target: rx.merge(made / "adapter", target, overwrite=True, progress=False)
    return lambda target: export(made / "sharded", target, verify=False, overwrite=True)


@pytest.mark.parametrize("there", [True, False], ids=["over another", "new"])
@pytest.mark.parametrize("kind", ["full", "adapter", "merge", "export"])
def test_a_disk_that_is_full_at_any_step_leaves_all_as_it_was(
    made: Path, tmp_path: Path, kind: str, there: bool
) -> None:
    write, target = writes(kind, made), tmp_path / "a" / "target"
    if there:
        shutil.copytree(made / "full", target)
        (target / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    failures = 0
    for number in range(1, 1000):
        fault = Fault(target, number, OSError(errno.ENOSPC, "No space left on device"))
        error: RopeExtendError | None = None
        with watching(fault):
            try:
                write(target)
            except RopeExtendError as raised:
                error = raised
        if fault.count < number:
            break
        if error is not None:
            failures += 1
            assert "No space left on device" in str(error)
            assert "\n" not in str(error)
            assert contents(tmp_path) == before, number
            assert (tmp_path / "a").exists() == there, number
            continue
        # Done all the same: what failed can be done without, as the card can, or a link that is then a copy.
        rx.load(target)
        shutil.rmtree(target if there else tmp_path / "a")
        if there:
            shutil.copytree(made / "full", target)
            (target / "notes.txt").write_text("mine")
    assert error is None
    assert failures > 10
    rx.load(target)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(kind, limit) for kind in ("full", "adapter", "merge") for limit in (0, 100, 500, 1500)]
    + [("full", 10_000), ("merge", 10_000)],
)
def test_a_file_that_does_not_fit_on_the_disk_leaves_all_as_it_was(
    made: Path, tmp_path: Path, kind: str, limit: int
) -> None:
    """The operating system itself refuses to write on, wherever the writing is done."""
    write, target = writes(kind, made), tmp_path / "target"
    shutil.copytree(made / "full", target)
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            RopeExtendError, match=r"File too large.*What was there before is intact"
        ) as error:
            write(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before


# ---------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("kind", ["full", "adapter", "export"])
def test_an_interruption_at_any_step_leaves_the_old_or_the_new(made: Path, tmp_path: Path, kind: str) -> None:
    write, target = writes(kind, made), tmp_path / "target"
    shutil.copytree(made / "full", target)
    (target / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    number, done, new = 0, False, 0
    while not done:
        number += 1
        try:
            with watching(Fault(target, number, KeyboardInterrupt(), clearing=True)):
                write(target)
            done = True
        except KeyboardInterrupt:
            if contents(tmp_path) != before:  # it was done, and tidying up
                new += 1
                rx.load(target)
                assert (target / "notes.txt").read_text() == "mine"
                shutil.rmtree(target)
                shutil.copytree(made / "full", target)
                (target / "notes.txt").write_text("mine")
    assert number > 10
    assert new < number / 2


KILLED = """
import json, os, shutil, signal, sys
import torch
torch.set_num_threads(1)
sys.path[:0] = json.loads(sys.argv[2])
from pathlib import Path
import rope_extend as rx
from test_integrity import Fault, extended, watching

class Killed(Fault):
    def __call__(self, event, arguments):
        try:
            super().__call__(event, arguments)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)

model, work, number = extended("linear"), Path(sys.argv[1]), 0
while True:
    number += 1
    target = Path(shutil.copytree(work / "old", work / f"killed-{number}"))
    child = os.fork()
    if not child:
        with watching(Killed(target, number, KeyboardInterrupt(), clearing=True)):
            rx.save(model, target, overwrite=True, max_shard_size="50KB")
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system kills otherwise")
def test_a_save_that_is_killed_leaves_the_old_or_the_new_or_says_where_the_old_is(
    made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made / "full", tmp_path / "old")
    old, expected = contents(tmp_path / "old"), logits(rx.load(made / "full"))
    model = extended("linear")
    paths = json.dumps([str(Path(__file__).parent), str(Path(rx.__file__).parents[1])])
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), paths], check=True)
    outcomes = {"old": 0, "new": 0, "told": 0}
    for target in tmp_path.glob("killed-*"):
        try:
            found = logits(rx.load(target))
            outcome = "old" if torch.equal(found, expected) else "new"
            assert outcome == "old" or torch.equal(found, logits(model))
        except RopeExtendError as error:
            outcome = "told"
            (backup,) = target.glob(".replaced-*")
            assert str(backup) in str(error)  # noqa: PT017
            there = {**contents(target), **contents(backup)}
            assert old.items() <= there.items()
        outcomes[outcome] += 1
        rx.save(model, target, overwrite=True)
        assert torch.equal(logits(rx.load(target)), logits(model))
        assert not list(target.glob(".unfinished-*"))
    assert outcomes["old"] > 10
    assert outcomes["told"] > 3
    assert outcomes["new"] >= 1


@each("adapter")
def test_files_of_others_are_replaced_only_when_asked(directory: Path, made: Path, tmp_path: Path) -> None:
    """A tokenizer makes no checkpoint, but it is somebody's."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text("mine")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(
        RopeExtendError, match=r"already holds tokenizer.json; choose another .*overwrite=True"
    ):
        rx.save(extended(), target, tokenizer)
    assert contents(target) == {"tokenizer.json": b"mine"}
    rx.save(extended(), target)
    rx.save(extended(), target, tokenizer, overwrite=True)
    assert (target / "tokenizer.json").read_text() != "mine"


def test_a_link_that_is_overwritten_leaves_what_it_led_to(made: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(made / "full", tmp_path / "target"))
    outside = tmp_path / "outside.safetensors"
    (target / WEIGHTS).rename(outside)
    (target / WEIGHTS).symlink_to(outside)
    before = outside.read_bytes()
    rx.save(extended("linear"), target, overwrite=True)
    assert outside.read_bytes() == before
    assert not (target / WEIGHTS).is_symlink()
    rx.load(target)


# ------------------------------------------------------------------------------------------ remote code


def test_trust_remote_code_is_never_true() -> None:
    """In the source: no argument, key or default of that name is anything but False."""
    root = Path(rx.__file__).parents[1]
    said = 0
    for path in sorted(
        [*root.glob("rope_extend/**/*.py"), *root.glob("patches/*.py"), *root.glob("scripts/*.py")]
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            values: list[Any] = []
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                values = [node.value]
            elif isinstance(node, ast.Assign):
                values = [node.value for t in node.targets if "trust_remote_code" in ast.unparse(t)]
            elif isinstance(node, ast.Dict):
                keyed = zip(node.keys, node.values, strict=True)
                values = [
                    v for k, v in keyed if isinstance(k, ast.Constant) and k.value == "trust_remote_code"
                ]
            elif isinstance(node, ast.Name | ast.arg):
                name = node.id if isinstance(node, ast.Name) else node.arg
                assert "remote_code" not in name, f"{path}:{node.lineno}"
            said += len(values)
            for value in values:
                assert isinstance(value, ast.Constant), f"{path}:{value.lineno}"
                assert value.value is False, f"{path}:{value.lineno}"
    assert said >= 2


@each("full", "adapter")
@pytest.mark.parametrize("value", [True, 1, "yes"])
def test_trust_remote_code_is_refused(directory: Path, value: Any) -> None:
    with pytest.raises(RopeExtendError, match="trust_remote_code=True is refused"):
        rx.load(directory, trust_remote_code=value)
    rx.load(directory, trust_remote_code=False)


@pytest.mark.usefixtures("made")
def test_code_in_a_checkpoint_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    where, ran = tmp_path / "hostile", tmp_path / "ran"
    rx.save(extended(), where)
    (where / "hostile.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\n")

    def hostile(data: dict[str, Any]) -> None:
        data["model_type"] = "hostile"
        data["auto_map"] = {"AutoConfig": "hostile.C", "AutoModelForCausalLM": "hostile.C"}

    rewritten(where / "config.json", hostile)
    unsealed(where)
    for read in (rx.load, rx.info, lambda where: export(where, tmp_path / "out"), rx.verify, write_card):
        with pytest.raises(RopeExtendError):
            read(str(where))
    with pytest.raises(SystemExit):
        main(["info", str(where)])
    assert not ran.exists()
    assert capsys.readouterr().err.startswith("rope-extend: error: ")


def test_a_tokenizer_s_code_is_not_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    adapter, ran = Path(shutil.copytree(made / "adapter", tmp_path / "adapter")), tmp_path / "ran"
    (adapter / "hostile.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\n")
    (adapter / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "C", "auto_map": {"AutoTokenizer": ["hostile.C", None]}})
    )
    with pytest.raises(RopeExtendError):
        rx.merge(adapter, tmp_path / "merged")
    assert not ran.exists()
    assert not (tmp_path / "merged").exists()


def test_the_window_is_the_one_that_the_tests_assume(made: Path) -> None:
    record = read_record(made / "adapter")
    assert (record.shape.trained_length, record.target_length) == (TRAINED, TARGET)
