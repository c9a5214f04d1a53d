"""Text comes in as text: each form of docs/training.md is read right, or refused with what to do."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from rope_extend.data.sources import read_texts
from rope_extend.errors import RopeExtendError

TEXT = 'Der Bär sagt "hallo".\nUnd läuft – weit, weit.\n' * 3
ROWS = [{"id": number, "text": f"{number}: {TEXT}"} for number in range(7)]
LINES = "\n".join(map(json.dumps, ROWS))


def table(delimiter: str) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


def write_arrow(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path.with_suffix(".dir"))
    (path.with_suffix(".dir") / "data-00000-of-00001.arrow").rename(path)


READ: dict[str, tuple[bytes | Callable[[Path], Any], list[str]]] = {
    "a.txt": (TEXT.encode(), [TEXT]),
    "README": (TEXT.encode(), [TEXT]),
    "windows.txt": (TEXT.replace("\n", "\r\n").encode(), [TEXT]),
    "marked.txt": (TEXT.encode("utf-8-sig"), [TEXT]),
    "wide.txt": (TEXT.encode("utf-16"), [TEXT]),
    "a.txt.gz": (gzip.compress(TEXT.encode()), [TEXT]),
    "a.md.bz2": (bz2.compress(TEXT.encode()), [TEXT]),
    "a.log.xz": (lzma.compress(TEXT.encode()), [TEXT]),
    "a.jsonl": (LINES.encode(), [row["text"] for row in ROWS]),
    "a.jsonl.gz": (gzip.compress(LINES.encode()), [row["text"] for row in ROWS]),
    "array.json": (json.dumps(ROWS).encode(), [row["text"] for row in ROWS]),
    "lines.json": (LINES.encode(), [row["text"] for row in ROWS]),
    "a.csv": (table(",").encode(), [row["text"] for row in ROWS]),
    "a.tsv": (table("\t").encode(), [row["text"] for row in ROWS]),
    "a.parquet": (datasets.Dataset.from_list(ROWS).to_parquet, [row["text"] for row in ROWS]),
    "a.arrow": (write_arrow, [row["text"] for row in ROWS]),
    "long.csv": (f"text\n{'x' * 200_000}\n".encode(), ["x" * 200_000]),
    "missing.jsonl": (b'{"text": null}\n\n{"n": 2}\n{"text": "abc"}', ["", "", "abc"]),
    "empty.jsonl": (b"", []),
}
CHAT = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
REFUSED: dict[str, tuple[bytes, str]] = {
    "cp1252.txt": (TEXT.encode("cp1252"), r"is no text in UTF-8.*iconv -f WINDOWS-1252 -t UTF-8 cp1252\.txt"),
    "cp1252.jsonl": (json.dumps(ROWS[0], ensure_ascii=False).encode("cp1252"), r"B\\xe4r sagt.*iconv -f"),
    "unmarked.txt": (("abc " * 9).encode("utf-16-le"), "zero bytes.*iconv -f"),
    "model.gguf": (b"GGUF\3\0\0\0" + bytes(range(256)) * 9, "is no text in UTF-8.*other formats"),
    "a.zip": (b"PK\3\4", "is an archive; unpack it"),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd", "is an archive; unpack it"),
    "cut.txt.gz": (gzip.compress(TEXT.encode() * 99)[:-20], "cannot read .*cut.txt.gz.*ended before"),
    "hurt.txt.gz": (gzip.compress(TEXT.encode())[:12] + b"hurt" * 9, "cannot read .*hurt.txt.gz"),
    "no.txt.xz": (b"not compressed", "cannot read .*no.txt.xz"),
    "chat.jsonl": (
        json.dumps(CHAT[0]).encode(),
        r"'messages'.*tokenizer\.apply_chat_template\(row\['messages",
    ),
    "number.jsonl": (b'{"text": "x"}\n{"text": 3}', "the column 'text' holds no text"),
    "late.jsonl": (b'{"text": "x"}\n' * 7 + b'{"text": 3}', "row 7 of .* holds no text in 'text': 3"),
    "list.json": (b"[1, 2]", "holds 1, where a row with columns should be"),
    "other.csv": (b"id,body\n1,abc\n", r"'text' does not exist .*\['id', 'body'\].*as text_column"),
    "no.parquet": (b"no parquet", "cannot read .*asked for 'parquet'"),
    # Few of its bytes are not UTF-8, and each would be a lost apostrophe.
    "quotes.txt": (("It’s text. " + "And more. " * 99).encode("cp1252"), r"It\\x92s tex.*WINDOWS-1252"),
    "broken.jsonl": (b'{"text": "abc"}\n\n{"text": "ab', "row 3: Unterminated string"),
    "deep.jsonl": (b'{"text":' * 100_000, "row 1: maximum recursion depth"),
    "half.jsonl": (rb'{"text": "ab\ud83d"}', r"row 0 .*'\\ud83d' in 'text', half of a surrogate pair"),
    "open.csv": (b'id,text\n1,"abc\n2,def\n', "row 1: unexpected end of data"),
}


@pytest.mark.parametrize("name", READ)
def test_a_form_of_text_is_read(name: str, tmp_path: Path) -> None:
    content, expected = READ[name]
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    assert [text for _, text in read_texts(path, "text", "train")] == expected


@pytest.mark.parametrize("name", REFUSED)
def test_another_form_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RopeExtendError, match=f"(?s){message}"):
        list(read_texts(tmp_path / name, "text", "train"))


def test_in_a_directory_tables_of_unknown_content_are_read_only_if_named(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl.gz", "index.csv", "meta.json", "c.md.xz", "picture.png"):
        content = READ["a.jsonl.gz" if "jsonl" in name else "a.log.xz" if "xz" in name else "a.txt"][0]
        assert isinstance(content, bytes)
        (tmp_path / name).write_bytes(content)
    names = list(dict.fromkeys(name.split("#")[0] for name, _ in read_texts(tmp_path, "text", "train")))
    assert names == ["b.txt", "c.md.xz", "a.jsonl.gz"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.csv").touch()
    with pytest.raises(RopeExtendError, match=r"\.csv, \.tsv are read only if they are named"):
        list(read_texts(tmp_path / "only", "text", "train"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_dataset_is_asked_for_by_id_config_and_split(
    monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    asked: dict[str, Any] = {}

    def hub(path: str, name: str | None, **options: Any) -> Any:
        asked.update(path=path, name=name, **options)
        table = datasets.Dataset.from_dict({"book": ["abc", None, *"defgh"], "n": range(7)})
        return table.to_iterable_dataset() if streaming else table

    monkeypatch.setattr(datasets, "load_dataset", hub)
    source = ["owner/books:long"] if streaming else "owner/books:long"  # alone, or as the one of a list
    texts = list(read_texts(source, "book", "test", streaming=streaming))
    assert texts == [(f"owner/books:long#{row}", text) for row, text in enumerate(["abc", "", *"defgh"])]
    expected = {"path": "owner/books", "name": "long", "split": "test"}
    assert asked == expected | ({"streaming": True} if streaming else {})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_misspelt_path_does_not_wait_for_the_network(
    monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """Without one, `datasets` would ask the hub again and again for half a minute."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it asks again"))
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    with pytest.raises(RopeExtendError, match=r"no file 'book/chapters' .*the hub cannot be asked"):
        list(read_texts("book/chapters", "text", "train", streaming=streaming))
