"""Attention of packed documents: each sees itself alone, without a mask over all pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_masks_for_generate

from rope_extend.attention.functions import acts_inside, attention_modules, implementation_of, out_of_reach
from rope_extend.attention.registry import beyond_plain, own_function, register, without_cudnn
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.loss import causal_lm, hidden_states
from rope_extend.models.config_facts import is_soft_capped, layer_types_except_full_attention
from rope_extend.models.families import family_for


def document_inputs(
    model: torch.nn.Module, positions: Tensor, tokens: Tensor | None = None
) -> dict[str, Any]:
    """Inputs of a decoder with which each token attends to its own document only.

    For eager attention, and for sdpa outside of `packed_attention`, this is a mask over all pairs, as
    transformers makes it for packed sequences. It is computed once for all layers and takes `T²` bytes per
    row with sdpa. Flash and flex attention need no such mask.

    Args:
        model: a causal language model, with or without PEFT and patch.
        positions: int64 `[B, T]`, the position of each token in its document; on the model's device. One
            that is not the previous one plus 1 begins another document.
        tokens: bool `[B, T]`, false for padding, which is apart too; by default there is none.

    Returns:
        `position_ids` `[B, T]`, `attention_mask` in the form that the family takes, and without a mask over
        pairs, the cumulative lengths of documents.

    Raises:
        RopeExtendError: there is not enough memory for the mask.
    """
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    batch, length = positions.shape
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    if tokens is not None:
        starts[:, 1:] |= tokens[:, 1:] != tokens[:, :-1]
    if "flash" in config._attn_implementation or config._attn_implementation == _NAME:
        first = starts.flatten().nonzero().flatten().to(torch.int32)
        edges = torch.cat([first, first.new_tensor([batch * length])])
        longest = int(edges.diff().max())
        if config._attn_implementation == _NAME:
            edges = edges.cpu()  # copied once, not in each layer
        return {
            "position_ids": positions,
            "attention_mask": torch.ones_like(positions),
            "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip
    # The mask functions use only the size, the dtype and the device of the embeddings.
    like = torch.empty(batch, length, 0, dtype=lm.dtype, device=positions.device)
    columns = torch.arange(length, device=positions.device)
    # For transformers too, a position that is not the previous one plus 1 begins another document.
    inside = columns - torch.where(starts, columns, 0).cummax(dim=1).values
    try:
        masks = create_masks_for_generate(config, like, None, None, position_ids=inside)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RopeExtendError(
            f"out of memory: under {config._attn_implementation} attention, the mask that separates packed "
            f"documents takes {batch} × {length:,}² numbers; use a shorter block_length or a smaller "
            "batch_size, or load the model with flash attention, which needs no mask"
        ) from error
    return {"position_ids": positions, "attention_mask": masks}


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention within each document.

    Args:
        query: `[B, H, T, D]`, rotated.
        key: `[B, KV, T, D]`, rotated; KV divides H.
        value: `[B, KV, T, V]`.
        edges: int `[documents + 1]`, the start of each document in the `B · T` tokens of all rows, and at the
            end `B · T`; no document spans two rows.
        scale: the scale of the logits; `D ** -0.5` if not given.
        dropout: the dropout of the weights.

    Returns:
        `[B, T, H, V]`, as from transformers' attention functions.
    """
    tokens = query.shape[2]
    outputs = []
    for start, stop in pairwise(edges.tolist()):
        row, first = divmod(start, tokens)
        document = (slice(row, row + 1), slice(None), slice(first, first + stop - start))
        with without_cudnn():  # documents hardly ever have the same length
            output = scaled_dot_product_attention(
                query[document], key[document], value[document], dropout_p=dropout, is_causal=True,
                scale=scale, enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1).view(len(query), tokens, query.shape[1], value.shape[-1])


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls under the name `rope_extend_packed`."""
    edges = kwargs.pop("cu_seq_lens_q", None)
    if edges is None:
        return own_function(module, "sdpa")(module, query, key, value, attention_mask, **kwargs)
    if beyond := beyond_plain(kwargs):
        raise UnsupportedModelError(
            f"packing separates documents in plain causal attention only, but {type(module).__name__} got "
            f"{', '.join(beyond)}; use packing: none"
        )
    scale, dropout = kwargs.get("scaling"), kwargs.get("dropout") or 0.0
    return document_attention(query, key, value, edges, scale=scale, dropout=dropout), None


_NAME = register("packed", _attention, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
"""The attention implementation under which sdpa takes cumulative lengths of documents."""


def beyond_plain_sdpa(lm: Any) -> str | None:
    """Why a model's attention is not plain causal attention over all tokens by sdpa; None if it is."""
    config = lm.config.get_text_config()
    implementation = config._attn_implementation
    modules = attention_modules(lm.base_model)
    if reason := out_of_reach(family_for(lm.config.model_type), modules):
        return reason
    if kinds := layer_types_except_full_attention(config):
        return f"it has layers of type {', '.join(sorted(kinds))}, not only full attention"
    if is_soft_capped(config) or any(hasattr(m, "sinks") for m in modules):
        return "its attention is more than a softmax over the tokens (a soft cap, or sinks)"
    if not getattr(config, "is_causal", True) or not all(getattr(m, "is_causal", True) for m in modules):
        return "its attention is not causal"
    if acts_inside(lm.base_model):
        return "its position encoding acts inside attention; a static rotary method works, such as yarn"
    if implementation != "sdpa":
        return f"attn_implementation is {implementation!r}; load the model with 'sdpa'"
    return None


@torch.no_grad()
def takes_no_mask(model: torch.nn.Module) -> bool:
    """Whether packed documents are separated without a mask over all pairs.

    For a family with plain sdpa, a forward of two tokens shows whether the lengths reach every layer. In
    StableLM they do not. The model may be on the meta device.
    """
    lm = causal_lm(model)
    if "flash" in lm.config.get_text_config()._attn_implementation:
        return True
    if beyond_plain_sdpa(lm) is not None:
        return False
    modules, reached = attention_modules(lm.base_model), set()

    def noted(module: torch.nn.Module, *states: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if kwargs.get("cu_seq_lens_q") is not None:
            reached.add(module)
        return _attention(module, *states, **kwargs)

    trial = register("packed_trial", noted, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=ids.device)  # otherwise transformers reads values
    with implementation_of([lm.base_model, *modules], lambda _: trial):
        hidden_states(model, ids, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 2]))
    return reached.issuperset(modules)


@contextmanager
def packed_attention(
    model: torch.nn.Module, run: Callable[[Callable[[torch.nn.Module], bool]], bool] | None = None
) -> Iterator[None]:
    """Inside the block, sdpa takes cumulative lengths of documents, if the model's attention is plain sdpa.

    Args:
        model: a causal language model of transformers, with or without PEFT and patch.
        run: calls a function with the model while its weights are gathered (FSDP); by default, a plain call.
    """
    lm = causal_lm(model)
    maskless = takes_no_mask(model) if run is None else run(takes_no_mask)
    modules = [lm.base_model, *attention_modules(lm.base_model)] if maskless else []
    with implementation_of(modules, lambda name: _NAME if name == "sdpa" else name):
        yield


@torch.no_grad()
def check_packed_attention(model: torch.nn.Module) -> None:
    """Check by two forwards of 16 tokens that a document does not attend to the one before it.

    Raises:
        RopeExtendError: it does, or the family does not take such a mask.
    """
    device = next(model.parameters()).device
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None].to(device)
    ids = torch.arange(1, 17, device=device)[None]
    changed = torch.where(torch.arange(16, device=device) < 7, ids + 16, ids)
    name = causal_lm(model).config.model_type
    training = model.training
    model.eval()
    try:
        inputs = document_inputs(model, positions)
        states, after_change = (hidden_states(model, row, **inputs)[0, 7:].float() for row in (ids, changed))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise RopeExtendError(
            f"packing does not work with {name}, which does not take a mask of packed documents "
            f"({type(error).__name__}: {error}); use packing: none"
        ) from error
    finally:
        model.train(training)
    tolerance = 1e-4 if causal_lm(model).dtype == torch.float32 else 3e-2
    if not torch.allclose(states, after_change, rtol=0, atol=tolerance * float(states.abs().max())):
        raise RopeExtendError(
            f"packing does not work with {name}: documents in one row attend to each other in spite of the "
            "mask; use packing: none"
        )
