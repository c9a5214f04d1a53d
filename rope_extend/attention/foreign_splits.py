"""Other ways to share a sequence among processes, refused where a patched model would compute something else.

- Ring attention of torch (`cp_size` of accelerate) replaces torch's attention function. Each process keeps
  its part of the tokens, so what needs other tokens inside attention is wrong, or waits for ever.
- Ulysses of DeepSpeed (`sp_size` of accelerate) wraps the attention functions of modules that have the
  model's own config. A module with a handler has another, so it would attend to its part of the tokens only.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_extend.attention.functions import acts_inside
from rope_extend.encodings import Encoding, RopeEncoding
from rope_extend.errors import PatchError

ENCODING = "_rope_extend_encoding"
"""The attribute of a decoder with the encoding of its active patch."""
INSTEAD = "use rope_extend.split_window(model) instead, which shares a window under every method"


def ring_mesh() -> Any:
    """The device mesh of torch's ring attention while it is active; otherwise None."""
    function: Any = functional.scaled_dot_product_attention
    if not (function.__module__ or "").startswith("torch.distributed"):
        return None
    return inspect.getclosurevars(function).nonlocals["device_mesh"]


def ulysses(decoder: Any) -> bool:
    """Whether DeepSpeed has wrapped the attention function of a decoder."""
    function = ALL_ATTENTION_FUNCTIONS.get(decoder.config._attn_implementation)
    return (getattr(function, "__module__", None) or "").startswith("deepspeed")


def ring_refusal(encoding: Encoding) -> str:
    """Why ring attention cannot compute an encoding; empty if it can, also with a factor on each query."""
    if isinstance(encoding, RopeEncoding) and not encoding.rotates_in_attention:
        return ""
    return f"{encoding} acts inside attention on queries and keys of other processes, or replaces RoPE"


def check_foreign_split(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a patched decoder.

    Raises:
        PatchError: another library shares the sequence, and the result would not be that of one process.
    """
    if torch.compiler.is_compiling():
        return
    encoding: Encoding = getattr(decoder, ENCODING)
    if ulysses(decoder) and acts_inside(decoder):
        raise PatchError(
            f"{encoding} acts inside attention, where DeepSpeed's sequence parallelism (sp_size) does not "
            f"reach: each process would see its part of the text only; {INSTEAD}"
        )
    if (mesh := ring_mesh()) is None:
        return
    setting = f"torch's ring attention (cp_size {mesh.size()})"
    if reason := ring_refusal(encoding):
        raise PatchError(
            f"{setting} does not work: {reason}; {INSTEAD}, or a method with one table, such as yarn"
        )
    positions = kwargs.get("position_ids")
    if positions is None:
        raise PatchError(
            f"{setting} needs the position_ids of the whole text, cut like its tokens; give them"
        )
    first = (positions == 0).sum(dim=-1)  # of each document one, and this process may not see it
    dist.all_reduce(first, group=mesh.get_group())
    if bool((first > 1).any()):
        raise PatchError(
            f"{setting} lets packed documents attend to each other, and these rows hold up to "
            f"{int(first.max())}; {INSTEAD} and keeps documents apart, or give each document its own row"
        )
