"""Short documents side by side in one block, each of which sees itself alone.

Packing wastes no token on padding and uses what is too short for a block of its own. It teaches a model
nothing about distances beyond its documents: attention stops where a document does, and so does what is
predicted. What tells documents apart are the cumulative lengths that flash attention reads; by them, where a
model's attention is plain causal attention by sdpa, each document is attended to alone, and no mask is made.
For all others it is transformers' own mask of packed sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    create_masks_for_generate,
)
from transformers.modeling_utils import AttentionInterface

from rope_extend.attention.functions import attention_modules, own_function
from rope_extend.data import Document, format_length
from rope_extend.encodings import AbsoluteEncoding, BiasEncoding, Encoding, RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.loss import IGNORED, causal_lm, hidden_states
from rope_extend.training.plain_attention import beyond_plain, beyond_plain_sdpa, in_place_of_sdpa

UNPACKED = "none"
"""The value of `packing` for blocks of one document each."""
RESTART = "restart"
"""Positions begin at 0 in each document of a block."""
CONTINUE = "continue"
"""Positions go on through the block, while attention is still to a token's own document alone."""
PACKINGS = (UNPACKED, RESTART, CONTINUE)

_NAME = "sdpa_of_documents"
"""The attention implementation under which sdpa reads cumulative lengths."""
_REACHED = "_rope_extend_lengths_reach"
"""The attribute by which an attention module finds where to note that it was given some."""

_CARRIES = ("linear", "conv", "mamba", "hybrid", "recurrent")
"""What the names of layers have in them that carry a state from token to token, past any mask."""


class PackedBlocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of `length` tokens cut from all documents laid end to end; made by :func:`packed_blocks`.

    Items are int64 `[length]`: `input_ids`; `labels`, which are the same tokens except that the first of each
    document is -100, so that no document is predicted from the one before it; and `places`, where each token
    stands in its document. A document that goes on in the next block begins there anew, at place 0.

    Attributes:
        length: tokens per block.
        restarts: whether positions begin at 0 in each document, rather than go on through the block.
    """

    def __init__(self, documents: Sequence[Document], length: int, *, restarts: bool) -> None:
        self.length, self.restarts = length, restarts
        self._documents = documents
        self._ends = np.cumsum([len(document) for document in documents]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self.length
        pieces: list[Tensor] = []
        number, filled = bisect_right(self._ends, first), 0
        while filled < self.length:
            document = self._documents[number].input_ids
            start = max(0, first - (self._ends[number] - len(document)))
            pieces.append(document[start : start + self.length - filled])
            filled += len(pieces[-1])
            number += 1
        return packed(pieces)

    @property
    def tokens_left_over(self) -> int:
        """Tokens at the end that do not fill a block."""
        return int(self._ends[-1] % self.length)

    def share_beyond(self, window: int) -> float:
        """Share of the tokens at positions `window` and above: what the old window never saw."""
        if not self.restarts:
            return max(0, self.length - window) / self.length
        beyond = sum(int((self[index]["places"] >= window).sum()) for index in range(len(self)))
        return beyond / (len(self) * self.length)

    def __repr__(self) -> str:
        return (
            f"PackedBlocks({len(self)} of {format_length(self.length)} tokens, from {len(self._documents)} "
            f"documents, {self.tokens_left_over} tokens left over)"
        )


def packed(pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """One item of :class:`PackedBlocks`, of the documents or pieces of documents it consists of."""
    ids = torch.cat(list(pieces))
    places = torch.cat([torch.arange(len(piece)) for piece in pieces])
    return {"input_ids": ids, "labels": ids.masked_fill(places == 0, IGNORED), "places": places}


def packed_blocks(documents: Sequence[Document], length: int, *, restarts: bool) -> PackedBlocks:
    """Lay documents end to end and cut the whole into blocks of `length` tokens.

    No token is used twice, and none is lost but those that do not fill the last block.

    Args:
        documents: where the text comes from, in the order in which it is laid.
        length: tokens per block, at least 2.
        restarts: whether positions begin at 0 in each document.

    Raises:
        RopeExtendError: all documents together have fewer tokens than a block, or a block has fewer than 2.
    """
    if length < 2:
        raise RopeExtendError(f"a block needs 2 tokens or more, one to read and one to predict; got {length}")
    tokens = sum(map(len, documents))
    if tokens < length:
        raise RopeExtendError(
            f"{len(documents)} documents have {tokens:,} tokens together, and a packed block has {length:,}; "
            "give more text, or a shorter block_length"
        )
    return PackedBlocks(documents, length, restarts=restarts)


def scored(items: Sequence[dict[str, Tensor]]) -> int:
    """How many tokens of some blocks are predicted; a block's first token never is."""
    return sum(int((item["labels"][1:] != IGNORED).sum()) for item in items)


# ---------------------------------------------------------------------------------------------------------
# What the model is told


def document_inputs(model: torch.nn.Module, places: Tensor, *, restarts: bool) -> dict[str, Any]:
    """Inputs of a decoder under which no token attends to another document than its own.

    For eager attention, and for sdpa outside of :func:`apart_without_mask`, that is a mask over all pairs,
    made once for all layers, `T²` bytes a row with sdpa: as transformers makes it for packed sequences. Flash
    and flex attention do without.

    Args:
        model: a causal language model, with or without PEFT and patch.
        places: int64 `[B, T]`, where each token stands in its document, from 0; on the model's device.
        restarts: whether positions begin at 0 in each document, rather than go on through the row.

    Returns:
        `position_ids` `[B, T]`, `attention_mask` in the form that the family reads, and where there is none
        over pairs, the cumulative lengths of documents.

    Raises:
        RopeExtendError: there is no memory for the mask.
    """
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    batch, length = places.shape
    positions = places if restarts else torch.arange(length, device=places.device).expand(batch, -1)
    if "flash" in config._attn_implementation or config._attn_implementation == _NAME:
        starts = (places == 0).flatten().nonzero().flatten().to(torch.int32)
        edges = torch.cat([starts, starts.new_tensor([batch * length])])
        longest = int(edges.diff().max())
        if config._attn_implementation == _NAME:
            edges = edges.cpu()  # read once, and not once more in each layer
        return {
            "position_ids": positions,
            "attention_mask": torch.ones_like(places),
            "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip
    # The mask functions read the size, the dtype and the device of the embeddings, and no more.
    like = torch.empty(batch, length, 0, dtype=lm.dtype, device=places.device)
    # By the places, whatever the positions: to transformers, one that does not follow the one before it by 1
    # begins another text.
    try:
        masks = create_masks_for_generate(config, like, None, None, position_ids=places)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RopeExtendError(
            f"out of memory: under {config._attn_implementation} attention, the mask that keeps packed "
            f"documents apart takes {batch} × {length:,}² numbers; use a shorter block_length or a smaller "
            "batch_size, or a model loaded with flash attention, which takes none"
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
        edges: int `[documents + 1]`, where each document begins in the `B · T` tokens laid end to end, and
            their number; no document goes on from one row to the next.
        scale: of the logits; `D ** -0.5` if not given.
        dropout: of the weights.

    Returns:
        `[B, T, H, V]`, as transformers' attention functions do.
    """
    tokens = query.shape[2]
    found = []
    for start, stop in pairwise(edges.tolist()):
        row, first = divmod(start, tokens)
        one = (slice(row, row + 1), slice(None), slice(first, first + stop - start))
        states = scaled_dot_product_attention(
            query[one], key[one], value[one], dropout_p=dropout, is_causal=True, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        found.append(states.transpose(1, 2))
    return torch.cat(found, dim=1).view(len(query), tokens, query.shape[1], value.shape[-1])


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls under the name `sdpa_of_documents`."""
    edges = kwargs.pop("cu_seq_lens_q", None)
    if edges is None:
        return own_function(module, "sdpa")(module, query, key, value, attention_mask, **kwargs)
    if (reached := getattr(module, _REACHED, None)) is not None:
        reached.add(id(module))
    if beyond := beyond_plain(kwargs):
        raise UnsupportedModelError(
            f"documents are kept apart in plain causal attention, and {type(module).__name__} was given "
            f"{', '.join(beyond)}; use packing: none"
        )
    scale, dropout = kwargs.get("scaling"), kwargs.get("dropout") or 0.0
    return document_attention(query, key, value, edges, scale=scale, dropout=dropout), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@torch.no_grad()
def takes_no_mask(model: torch.nn.Module) -> bool:
    """Whether packed documents are kept apart without a mask over all pairs.

    Where sdpa is all that a family does, two tokens are read to see that the lengths reach every layer: in
    StableLM's they do not. A model without values, on the meta device, will do.
    """
    lm = causal_lm(model)
    if "flash" in lm.config.get_text_config()._attn_implementation:
        return True
    if beyond_plain_sdpa(lm) is not None:
        return False
    reached: set[int] = set()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=ids.device)  # else transformers looks at values
    with in_place_of_sdpa(lm, _NAME, _REACHED, reached):
        hidden_states(model, ids, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 2]))
    return all(id(module) in reached for module in attention_modules(lm.base_model))


@contextmanager
def apart_without_mask(
    model: torch.nn.Module, run: Callable[[Callable[[torch.nn.Module], bool]], bool] | None = None
) -> Iterator[None]:
    """Let sdpa read cumulative lengths inside the block, in a model whose attention is no more than that.

    Args:
        model: a causal language model of transformers, with or without PEFT and patch.
        run: hands the model to a function that reads with it, where its weights are not always there (FSDP).
    """
    lm = causal_lm(model)
    apart = takes_no_mask(model) if run is None else run(takes_no_mask)
    sdpa = lm.config.get_text_config()._attn_implementation == "sdpa"
    with in_place_of_sdpa(lm, _NAME, _REACHED, None) if apart and sdpa else nullcontext():
        yield


def check_packing(packing: str, encoding: Encoding, shape: RopeShape, config: Any) -> None:
    """Refuse an encoding or a family under which documents cannot share a row.

    Raises:
        RopeExtendError: naming what cannot, the reason, and what works.
    """
    kinds = {
        kind
        for kind in getattr(config.get_text_config(), "layer_types", None) or ()
        if any(name in kind for name in _CARRIES)
    }
    reason = None
    if not isinstance(encoding, RopeEncoding | BiasEncoding | AbsoluteEncoding):
        reason = "it carries sums from token to token, which a mask does not stop at a document's end"
    elif kinds:
        reason = (
            f"layers of kind {', '.join(sorted(kinds))} carry a state from token to token, which a mask does "
            "not stop at a document's end"
        )
    elif isinstance(encoding, RopeEncoding):
        ends = torch.tensor([shape.trained_length - 1, 8 * shape.trained_length])
        scale = encoding.logit_scale(shape, ends)
        if packing == RESTART and encoding.per_row:
            reason = (
                "it reads each row by the table of the row's length, and documents in one row have lengths "
                "of their own; per='query' takes part"
            )
        elif packing == CONTINUE and scale is not None and scale[0] != scale[1]:
            reason = (
                "it sharpens attention by the number of tokens that a query can see, and positions that go "
                "on count those of other documents; packing restart takes part"
            )
    if reason is not None:
        raise RopeExtendError(
            f"packing {packing} and {encoding} on {config.model_type} do not go together: {reason}. Blocks "
            "of one document each work with all (packing: none)"
        )


@torch.no_grad()
def check_apart(model: torch.nn.Module, *, restarts: bool) -> None:
    """Try on the model itself that a document does not see the one before it: two forwards of 16 tokens.

    Raises:
        RopeExtendError: it does, or the family takes no such mask.
    """
    device = next(model.parameters()).device
    places = torch.cat([torch.arange(7), torch.arange(9)])[None].to(device)
    ids = torch.arange(1, 17, device=device)[None]
    other = torch.where(torch.arange(16, device=device) < 7, ids + 16, ids)
    name = causal_lm(model).config.model_type
    training = model.training
    model.eval()
    try:
        inputs = document_inputs(model, places, restarts=restarts)
        one, two = (hidden_states(model, row, **inputs)[0, 7:].float() for row in (ids, other))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise RopeExtendError(
            f"packing does not work with {name}, which does not read a mask of packed documents "
            f"({type(error).__name__}: {error}); use packing: none"
        ) from error
    finally:
        model.train(training)
    tolerance = 1e-4 if causal_lm(model).dtype == torch.float32 else 3e-2
    if not torch.allclose(one, two, rtol=0, atol=tolerance * float(one.abs().max())):
        raise RopeExtendError(
            f"packing does not work with {name}: its documents see each other in one row, whatever the mask; "
            "use packing: none"
        )
