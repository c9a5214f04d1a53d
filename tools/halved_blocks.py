"""The text that a run with blocks of 16k reads, for a control with blocks of 8k: the same tokens each step.

    python tools/halved_blocks.py corpus/train --model model/SmolLM2-135M-Instruct --blocks 120 \
        --output corpus/halved.jsonl

Each line is half a block. The control reads the lines in the order of the blocks if it has the same seed,
`--block-length 8k` and `--gradient-accumulation 2`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rope_extend.data.blocks import cut_blocks
from rope_extend.data.documents import Document, load_documents
from rope_extend.data.mixing import block_index

SPARE = 64
"""Tokens after each half. Text that is cut within a word may have fewer tokens than it was cut from."""


def halves(documents: list[Document], tokenizer: Any, length: int, count: int, seed: int) -> list[str]:
    """The halves of the first `count` blocks of a run, at the places where a run of `seed` looks for them."""
    blocks = cut_blocks(documents, length)
    tokens = {document.name: document.input_ids for document in documents}
    placed = {}
    for position in range(2 * count):
        name, start = blocks.origin(block_index(position // 2, seed, len(blocks)))
        first = start + position % 2 * (length // 2)
        text = tokenizer.decode(tokens[name][first : first + length // 2 + SPARE])
        placed[block_index(position, seed, 2 * count)] = text
    return [placed[place] for place in range(2 * count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="the training text of the run with long blocks")
    parser.add_argument("--model", required=True, help="the checkpoint, for its tokenizer")
    parser.add_argument("--blocks", type=int, required=True, help="how many blocks the long run reads")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a long block (default: 16384)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (default: 0)")
    parser.add_argument("--output", type=Path, required=True, help="a new file")
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    documents = load_documents(asked.data, tokenizer, min_tokens=asked.length)
    texts = halves(documents, tokenizer, asked.length, asked.blocks, asked.seed)
    with asked.output.open("x", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


if __name__ == "__main__":
    main()
