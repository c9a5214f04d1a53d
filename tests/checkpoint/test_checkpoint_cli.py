"""merge, export, verify, card and info on the command line: each mistake gives one clear line."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from integrity import flip
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.record import read_record, write_record
from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR


@pytest.fixture(scope="module")
def made(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Intact and damaged directories, and a file."""
    where = Path(shutil.copytree(checkpoints, tmp_path_factory.mktemp("made") / "checkpoints"))
    for source, names in {"full": "flipped damaged mixed", "adapter": "cut unrecorded newer"}.items():
        for name in names.split():
            shutil.copytree(where / source, where / name)
    flip(where / "flipped" / "model.safetensors")
    (where / "cut" / "adapter_model.safetensors").write_bytes(b"")
    (where / "unrecorded" / "rope_extend.json").unlink()
    (where / "newer" / "rope_extend.json").write_text('{"schema_version": 7}')
    (where / "damaged" / "rope_extend.json").write_text('{"schema_version": 2}')
    write_record(where / "mixed", replace(read_record(where / "mixed"), target_length=64))
    (where / "file").write_text("mine")
    (where / "some.gguf").write_text("mine")
    return where


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("info nowhere", "no directory 'nowhere'"),
        ("info file", "cannot load the config of 'file'"),
        ("info newer", "schema_version is 7"),
        ("info damaged", "damaged/rope_extend.json: missing keys"),
        ("info mixed", "mixed/config.json does not agree with the rope_extend.json next to it"),
        ("info unrecorded", "holds an adapter without rope_extend.json"),
        ("merge adapter", "--output"),
        ("merge adapter --output full", "full already holds a checkpoint (config.json)"),
        ("merge adapter --output adapter", "is the adapter itself"),
        ("merge adapter --output file", "it is a file"),
        ("merge adapter --output x --base-model nowhere", "cannot find the base model 'nowhere'"),
        ("merge adapter --output x --base-model full --max-shard-size big", "not a size in memory: 'big'"),
        ("merge adapter --output x --dtype int8", "invalid choice: 'int8'"),
        ("merge full --output x", "holds no adapter"),
        ("merge nowhere --output x", "no directory 'nowhere'"),
        ("merge cut --output x", "adapter_model.safetensors is truncated or damaged"),
        ("merge unrecorded --output x", "no rope_extend.json in unrecorded"),
        ("export full", "export needs --output, or --support"),
        ("export full --to ollama --output x", "got 'ollama'"),
        ("export full --to llama.cpp --output x", "convert the weights with its convert_hf_to_gguf.py"),
        ("export full --to llama.cpp --output x --gguf nothing.gguf", "cannot read nothing.gguf as GGUF"),
        ("export full --to llama.cpp --output x --gguf some.gguf", "some.gguf as GGUF"),
        ("export full --to vllm --output x --gguf some.gguf", "--gguf is for llama.cpp"),
        ("export full --output full --overwrite", "is the checkpoint itself"),
        ("export flipped --output x", "is not what was saved"),
        ("export nowhere --support", "there is no directory nowhere"),
        ("verify nowhere", "there is no directory nowhere"),
        ("verify file", "no rope_extend.json in file"),
        ("verify flipped", "is not what was saved"),
        ("verify full --tolerance 0", "must be above 0"),
        ("verify full --reference nowhere", "cannot find the checkpoint 'nowhere'"),
        ("card nowhere", "there is no directory nowhere"),
        ("card base", "no rope_extend.json in base"),
        ("card full --results nowhere", "no results at 'nowhere'"),
    ],
)
def test_a_mistake_is_one_clear_line(
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    message: str,
) -> None:
    if "llama.cpp" in command:
        pytest.importorskip("gguf", reason="the package gguf is not installed")
    monkeypatch.chdir(made)
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as error:
        main(shlex.split(command))
    assert error.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(said) == 1
    assert message in said[0]
    assert "Traceback" not in said[0]
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before
    assert not (made / "x").exists()


@pytest.mark.parametrize(("method", "verifies"), [("yarn", True), ("jet_long", False)])
def test_merge_suggests_a_command_that_succeeds(
    method: str, verifies: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    rx.extend(model, 512, method)
    rx.save(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), tmp_path / "adapter")
    main(["merge", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")])
    said = capsys.readouterr().out
    suggested = re.search("verify it: rope-extend (.*)", said)
    assert bool(suggested) == verifies
    if suggested:
        main(shlex.split(suggested[1]))
    else:
        assert "load it with rope_extend.load" in said
