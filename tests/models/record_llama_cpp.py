"""Record llama.cpp's own tokens of some texts, for `test_gguf_tokenizer.py`.

    pip install --no-deps --target build/xllamacpp xllamacpp
    PYTHONPATH=build/xllamacpp:tests:tests/models python tests/models/record_llama_cpp.py [MODEL.gguf]

xllamacpp is a build of llama.cpp with its server. Without an argument, the small vocabularies of
`test_gguf_tokenizer.py` are recorded, each with its tokenizer. With the file of a model, that model's tokens
are recorded.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llama_cpp_texts import RECORDED, TEXTS


def tokens_of(file: Path) -> list[list[int]]:
    """The tokens of all texts, by llama.cpp, without the tokens that it adds at the ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.warmup = 256, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)

    def post(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        found: list[int] = json.loads(urllib.request.urlopen(request).read())["tokens"]
        return found

    return [post(text) for text in TEXTS]


def small_vocabularies() -> dict[str, Any]:
    """The tokens of each small vocabulary, with its tokenizer."""
    from test_gguf_tokenizer import WORDS, byte_level, file_with

    recorded = {}
    for kind in WORDS:
        tokenizer = byte_level(kind)
        keys = {"ggml.pre": kind, "ggml.add_bos_token": False, "ggml.bos_token_id": 1, "ggml.eos_token_id": 0}
        with TemporaryDirectory() as folder:
            file = file_with(Path(folder) / "words.gguf", tokenizer, "gpt2", **keys)
            recorded[kind] = {"tokenizer": tokenizer.to_str(), "tokens": tokens_of(file)}
    return recorded


def main() -> None:
    """Add what was recorded to the file."""
    found = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    found["recorded_with"] = f"xllamacpp {version('xllamacpp')}"
    if len(sys.argv) > 1:
        file = Path(sys.argv[1])
        found.setdefault("models", {})[file.name] = tokens_of(file)
    else:
        found["vocabularies"] = small_vocabularies()
    RECORDED.write_text(json.dumps(found, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
