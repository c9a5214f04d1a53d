"""A recipe as YAML with a comment on each line, as a person would write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rope_extend.units import format_length

_LENGTHS = ("target_length", "block_length", "trained_length")
_COMMENTS = {
    "model": "a hub id or a local directory",
    "data": "long documents: a directory, a glob, or a hub dataset",
    "output_dir": "adapter, rope_extend.json, recipe.yaml, metrics.jsonl, checkpoints",
    "target_length": "the new window; the method's factor follows from it",
    "trained_length": "the pretrained window, because the config is wrong",
    "method": "position encoding; `rope-extend methods` lists them",
    "start": "extend the scaling that the model was trained under, not plain RoPE",
    "block_length": "tokens of a training sequence",
    "positions": "positions of these blocks come from the whole target window (2309.10400)",
    "steps": "optimizer steps",
    "batch_size": "sequences in one forward pass",
    "gradient_accumulation": "forward passes per step: 8, or fewer if 8 have more than 262k tokens",
    "quantize": "frozen weights in 4 bits; needs pip install 'rope_extend[quantize]'",
    "train_norm_embed": "norms and embeddings too, which helps beyond about 4 times the window (2309.12307)",
    "dtype": "dtype of the frozen weights; LoRA stays in float32",
    "eval_data": "documents for perplexity before, during and after",
    "eval_split": "not used for training",
    "eval_lengths": "windows that books reach",
    "eval_documents": "whole documents, cut to the longest window",
    "eval_every": "steps between evaluations",
    "save_every": "steps between checkpoints",
    "max_documents": "about 100k tokens each in this dataset",
}


def recipe_text(fields: Mapping[str, Any], head: Sequence[str]) -> str:
    """The YAML of a recipe.

    Args:
        fields: the fields that the recipe sets.
        head: lines of comments for the top, without the mark.
    """
    rows = []
    for name, value in fields.items():
        shown = format_length(value) if name in _LENGTHS else value
        if name == "eval_lengths":
            shown = [format_length(length) for length in value]
        flow = None if isinstance(shown, list) else False  # a list stays on its line
        line = yaml.safe_dump({name: shown}, default_flow_style=flow, allow_unicode=True, width=1000).strip()
        rows.append((line, _COMMENTS.get(name, "")))
    width = min(40, max(len(line) for line, _ in rows))
    lines = [f"{line:<{width}}  # {comment}" if comment else line for line, comment in rows]
    return "\n".join([*(f"# {line}" for line in head), *lines]) + "\n"
