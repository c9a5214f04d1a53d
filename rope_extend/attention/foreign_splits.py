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

from rope_extend.attention.functions import acts_inside, attention_modules, out_of_reach
from rope_extend.encodings import Encoding, RopeEncoding
from rope_extend.errors import PatchError, RopeExtendError, UnsupportedModelError, refuse_if
from rope_extend.models.config_facts import layer_config
from rope_extend.models.decoders import decoder_layers
from rope_extend.models.families import family_for
from rope_extend.models.rotary import ExtendedRotaryEmbedding

ENCODING = "_rope_extend_encoding"
"""The attribute of a decoder with the encoding of its active patch."""
SINKS = "sinks"
"""The parameter of attention modules with one number for each head, as in gpt-oss."""


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


def check_shareable(lm: Any, decoder: nn.Module, processes: int) -> None:
    """Refuse a decoder whose layers several processes cannot compute together; `lm` may be that decoder."""
    model_type = lm.config.model_type
    heads = layer_config(lm.config).num_attention_heads
    refuse_if(
        heads % processes != 0,
        f"split_window: {heads} heads cannot be shared by {processes} processes; use a number of processes "
        f"that divides {heads}",
    )
    family, modules = family_for(model_type), attention_modules(decoder)
    reason = out_of_reach(family, modules) or None
    found = decoder_layers(lm)
    layers = [] if found is None else list(found.layers)
    attending = set(modules)
    if reason is None and not (layers and all(attending & set(layer.modules()) for layer in layers)):
        reason = "it has layers that mix tokens without attention"
    if any(isinstance(module, nn.Conv1d) for layer in layers for module in layer.modules()):
        reason = reason or "it has convolutions over the tokens"
    if any({name for name, _ in module.named_parameters(recurse=False)} - {SINKS} for module in modules):
        reason = reason or "its attention has parameters besides its projections"
    if reason is not None:
        raise UnsupportedModelError(
            f"split_window: {model_type} cannot be shared by several processes: {reason}"
        )
    for module in family.rotary_modules(lm.base_model).values():
        kinds = str(getattr(module, "rope_type", ""))
        if not isinstance(module, ExtendedRotaryEmbedding) and ("dynamic" in kinds or "longrope" in kinds):
            raise UnsupportedModelError(
                f"split_window: the rotary module of transformers for {kinds} follows the longest text that "
                "a process sees, which is a part here; call rope_extend.extend(model, ...) or load the model "
                "with rope_extend.load"
            )


def _instead(decoder: nn.Module, processes: int) -> str:
    """What to use instead, as a clause: `split_window` does not share every model."""
    try:
        check_shareable(decoder, decoder, processes)
    except RopeExtendError as error:
        return f"rope_extend.split_window does not share this model either ({error}). Use one process"
    return "use rope_extend.split_window(model) instead, which shares a window under every method"


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
            f"reach: each process would see its part of the text only; {_instead(decoder, 1)}"
        )  # DeepSpeed has checked the number of processes
    if (mesh := ring_mesh()) is None:
        return
    setting = f"torch's ring attention (cp_size {mesh.size()})"
    if reason := ring_refusal(encoding):
        raise PatchError(
            f"{setting} does not work: {reason}; {_instead(decoder, mesh.size())}, or a method with one "
            "table, such as yarn"
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
            f"{int(first.max())}; {_instead(decoder, mesh.size())}, or give each document its own row"
        )
