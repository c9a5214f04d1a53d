"""The text that a run with long blocks reads, for a control with shorter ones: the same tokens each step.

    python tools/shorter_blocks.py corpus/train --model model/SmolLM2-135M-Instruct --blocks 120 \
        --output corpus/shorter.jsonl

Each line is a part of a block: half of one of 16k. The control reads the lines in the order of the blocks if
it has the same seed, `--block-length 8k`, and the `--gradient-accumulation` of the long run times the number
of parts. The tool tokenises each line again and prints how many tokens differ from those of the blocks. Text
cannot begin within a character, and a block can: if more than one token in 100 differs, nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rope_extend.checks import integer
from rope_extend.data.blocks import block_starts, cut_blocks
from rope_extend.data.documents import Document, load_documents
from rope_extend.data.mixing import block_index
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.files import check_creatable, expand_home, write_text
from rope_extend.models.loading import pretrained
from rope_extend.units import parse_length

SPARE = 64
"""Tokens after each part. Text that is cut within a word may have fewer tokens than it was cut from."""


def parts(
    documents: list[Document], tokenizer: Any, length: int, short: int, count: int, seed: int
) -> tuple[list[str], int]:
    """The first `count` blocks of a run in parts, at the places where a run of `seed` looks for them.

    Args:
        length: tokens of a block.
        short: tokens of a part.

    Returns:
        The texts, and how many of their tokens differ from those of the blocks.

    Raises:
        RopeExtendError: a text gives too few tokens for a part, or enough for two.
    """
    blocks, each, differing = cut_blocks(documents, length), length // short, 0
    tokens = {document.name: document.input_ids for document in documents}
    placed = {}
    for position in range(each * count):
        name, start = blocks.origin(block_index(position // each, seed, len(blocks)))
        first = start + position % each * short
        text = tokenizer.decode(tokens[name][first : first + short + SPARE])
        ids = tokenizer(text, verbose=False)["input_ids"]
        refuse_if(
            len(block_starts(len(ids), short)) != 1,
            f"the text of {short:,} tokens at token {first:,} of {name!r}, with up to {SPARE} more, has "
            f"{len(ids):,} if it is tokenised again; give both runs another seed, or use another model",
        )
        differing += int((torch.tensor(ids[:short]) != tokens[name][first : first + short]).sum())
        placed[block_index(position, seed, each * count)] = text
    return [placed[place] for place in range(each * count)], differing


def write(asked: argparse.Namespace) -> None:
    """Check all that was asked, cut the blocks and write the file.

    Raises:
        RopeExtendError: a mistake in what was asked, or a tokenizer that would move the tokens of each part.
    """
    length, short = parse_length(asked.length), parse_length(asked.short)
    refuse_if(  # a part with its spare tokens must not give two blocks
        short <= 2 * SPARE, f"--short must be above {2 * SPARE} tokens; got {asked.short}"
    )
    refuse_if(
        length % short > 0 or length == short,
        f"--length must be a multiple of --short, {short:,} tokens; got {length:,}",
    )
    integer(1)("shorter_blocks", "--blocks", asked.blocks)
    integer(0, 2**31)("shorter_blocks", "--seed", asked.seed)
    output = Path(expand_home(asked.output))
    refuse_if(output.suffix != ".jsonl", f"--output must end in .jsonl; got {asked.output}")
    refuse_if(os.path.lexists(output), f"{output} exists; give another --output, or remove it")
    check_creatable(output.parent)
    tokenizer = pretrained(AutoTokenizer, expand_home(asked.model))
    refuse_if(
        tokenizer("a")["input_ids"][:1] != tokenizer("a", add_special_tokens=False)["input_ids"][:1],
        f"the tokenizer of {asked.model} puts a token (BOS) before each text, which moves the tokens of each "
        "part by one; use a model whose tokenizer adds none",
    )
    documents = load_documents(asked.data, tokenizer, min_tokens=length)
    texts, differing = parts(documents, tokenizer, length, short, asked.blocks, asked.seed)
    count = asked.blocks * length
    refuse_if(
        differing * 100 > count,
        f"{differing:,} of {count:,} tokens would differ from those of the blocks, which begin within "
        "characters; use a tokenizer with one token for a character, or other texts",
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    why = ", where a block begins within a character" if differing else ""
    print(f"{output}: {differing:,} of {count:,} tokens differ from those of the blocks{why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="the training text of the run with long blocks")
    parser.add_argument("--model", required=True, help="the checkpoint, for its tokenizer")
    parser.add_argument("--blocks", type=int, required=True, help="how many blocks the long run reads")
    parser.add_argument("--length", default="16k", help="tokens of a long block (default: 16k)")
    parser.add_argument("--short", default="8k", help="tokens of a part (default: 8k)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (default: 0)")
    parser.add_argument("--output", required=True, help="a new file")
    try:
        write(parser.parse_args())
    except (RopeExtendError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
