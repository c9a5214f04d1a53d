"""Linear attention instead of softmax, for every `KernelEncoding`, with running sums instead of keys.

`out_m = sum_n (R_m f(q_m)) . (R_n f(k_n)) v_n / sum_n f(q_m) . f(k_n)` over n up to m, with R the rotation
and f the feature map (2104.09864, section 3.3). The contribution of all earlier tokens is two sums per head,
a matrix and a vector. They replace keys and values in the cache. Within chunks of tokens, products are
computed directly as matrices. So time is linear in the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from rope_extend.attention.forwards import Forward
from rope_extend.attention.functions import AttentionCall, attention_window, extended_modules
from rope_extend.attention.masks import MASK_ROWS, sees_later_keys, visible
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import is_dense
from rope_extend.attention.rotation import rotate
from rope_extend.attention.tracked_cache import cached_tokens
from rope_extend.encodings import KernelEncoding, RopeShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.families import FamilyAdapter
from rope_extend.models.rotary import InitialRotation, angles_of
from rope_extend.models.undo import UndoLog

CHUNK = 128
"""Tokens of a chunk within which products are computed directly."""

_OBSTACLE = "_rope_extend_obstacle"
"""The attribute of a cache with the reason why it cannot hold states."""

State = tuple[Tensor, Tensor]
"""Two sums over all tokens so far, float32: rotated key features times values,
`[batch, kv_heads, head_dim, value_dim]`, and key features, `[batch, kv_heads, head_dim]`."""


def linear_attention(
    query: Tensor, key: Tensor, rotated_query: Tensor, rotated_key: Tensor, value: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """Causal linear attention and the state after it, in time linear in the number of tokens.

    Args:
        query: features `[batch, heads, T, head_dim]`, above 0.
        key: features `[batch, kv_heads, T, head_dim]`, above 0, or 0 for padding.
        rotated_query: `query`, rotated.
        rotated_key: `key`, rotated.
        value: `[batch, kv_heads, T, value_dim]`.
        state: the sums over earlier tokens; None if there are none.

    Returns:
        `[batch, heads, T, value_dim]` float32, and the sums including these tokens.
    """
    groups = query.shape[1] // key.shape[1]
    heads = (len(query), key.shape[1], groups, *query.shape[2:])
    query, rotated_query = query.reshape(heads), rotated_query.reshape(heads)
    value = value.to(torch.float32)
    if state is None:
        state = (
            key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]),
            key.new_zeros(*key.shape[:2], key.shape[-1]),
        )
    products, sums = state
    outputs = []
    for start in range(0, key.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        k, rotated_k, v = key[:, :, chunk], rotated_key[:, :, chunk], value[:, :, chunk]
        q, rotated_q = query[:, :, :, chunk], rotated_query[:, :, :, chunk]
        inside = (rotated_q @ rotated_k[:, :, None].mT).tril()
        shares = (q @ k[:, :, None].mT).tril()
        numerator = inside @ v[:, :, None] + rotated_q @ products[:, :, None]
        denominator = shares.sum(dim=-1) + (q @ sums[:, :, None, :, None]).squeeze(-1)
        # For a query without visible keys, as in padding, 0 / 0 counts as 0.
        outputs.append(numerator / torch.where(denominator == 0, 1.0, denominator)[..., None])
        products = products + rotated_k.mT @ v
        sums = sums + k.sum(dim=2)
    return torch.cat(outputs, dim=3).flatten(1, 2), (products, sums)


class StateLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer of a cache that holds the state of linear attention instead of keys.

    Args:
        state: the sums over all tokens so far.
        seen: the number of these tokens.
    """

    is_sliding = False

    def __init__(self, state: State, seen: int) -> None:
        super().__init__()
        self.state = state
        self.seen = seen
        self.keys = self.values = state[1].new_empty(0)  # some families check that they exist
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer is made with a state."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values only; they are added to the state at the end of the forward."""
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks cover the new keys only."""
        return query_length, self.seen

    def get_seq_length(self) -> int:
        """The number of tokens seen."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.seen = tuple(torch.zeros_like(each) for each in self.state), 0  # type: ignore[assignment]

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible.

        Raises:
            PatchError: always.
        """
        raise PatchError("linear attention keeps a sum of all tokens, and no token can be removed from it")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows."""
        products, sums = self.state
        self.state = products[indices.to(products.device)], sums[indices.to(sums.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        products, sums = self.state
        self.state = products.repeat_interleave(repeats, dim=0), sums.repeat_interleave(repeats, dim=0)

    def offload(self) -> None:
        """Do nothing: the state is small."""

    def prefetch(self) -> None:
        """Do nothing: the state was not offloaded."""


class KernelHandler(AttentionHandler):
    """Computes linear attention instead of a model's own, for one patch of one model.

    Args:
        encoding: the feature map and the rotation.
        adapter: the model's family.
        shape: the rotary shape of the model.
    """

    encoding: KernelEncoding
    shape: RopeShape

    def __init__(self, encoding: KernelEncoding, adapter: FamilyAdapter, shape: RopeShape) -> None:
        super().__init__(encoding, adapter)
        self.shape = shape
        self._start: InitialRotation | None = None  # for softmax attention, while the model is annealed

    def blend(self, share: float, start: InitialRotation) -> float:
        """Set the weight of linear attention, against softmax attention with the model's own rotation.

        Between 0 and 1 queries and keys are rotated in `attend`, so the rotary module must not rotate.
        """
        self.share, self._start = share, start
        return 0.0 if share == 0 else 1.0

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Replace the attention of a decoder.

        Raises:
            UnsupportedModelError: this is not possible in the family, or not with the attention
                implementation, or a layer has a sliding window.
        """
        super().install(decoder, undo)
        for module in extended_modules(self.encoding, decoder, self.adapter):
            if attention_window(module) is not None:
                raise UnsupportedModelError(
                    f"{self.encoding} attends to all earlier tokens, but {type(module).__name__} of this "
                    f"{decoder.config.model_type} model only to a window of them"
                )

    def check_implementation(self, implementation: str) -> None:
        """Refuse attention implementations that take no mask over queries and keys.

        Raises:
            UnsupportedModelError: padding is not known under the implementation.
        """
        super().check_implementation(implementation)
        if not is_dense(implementation):
            raise UnsupportedModelError(
                f"{self.encoding} finds padding in a mask that {implementation} does not have; use "
                f"attn_implementation='sdpa' or 'eager'"
            )

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Linear attention, without attention weights.

        Raises:
            PatchError: an option that has no meaning without softmax, a mask that shows later tokens or
                hides earlier ones, or a cache that cannot be continued.
        """
        for name in ("dropout", "softcap", "s_aux", "output_attentions"):
            value = call.kwargs.get(name)
            if isinstance(value, Tensor) or value:
                raise PatchError(f"{self.encoding} has no softmax, so {name} has no meaning; turn it off")
        forward, module = self.forward_of_call(call), call.module
        query, key, value = call.query, call.key, call.value
        new, layer = query.shape[2], _layer(module, forward)
        state = layer.state if isinstance(layer, StateLayer) else None
        key, value = key[:, :, :new], value[:, :, :new]  # the rest are empty slots
        q, k = self.encoding.features(query), self.encoding.features(key)
        if sees_later_keys(call, forward):
            raise PatchError(
                f"{self.encoding} adds up earlier tokens, but this input lets tokens attend to later ones "
                f"(an image, a prefix or is_causal=False); use causal attention"
            )
        if isinstance(call.mask, Tensor):
            key_of_mask = ("visible", id(call.mask))
            if key_of_mask not in forward.tables:  # with the mask, so that no other one gets its id
                forward.tables[key_of_mask] = call.mask, self._visible(call.mask[..., :new])
            k = k * forward.tables[key_of_mask][1][:, None, :, None].to(k.device)
        output, state = linear_attention(
            q, k, self._rotated(q, forward), self._rotated(k, forward), value, state
        )
        if forward.running:
            kind = "twice" if ("state", module.layer_idx) in forward.tables else "state"
            forward.tables[kind, module.layer_idx] = tuple(each.detach() for each in state)
        output = output.to(value.dtype).transpose(1, 2).contiguous()
        if self.share != 1:
            if layer is not None and layer.get_seq_length() > new:
                raise PatchError(
                    f"{self.encoding} is blended with softmax attention and cannot use a cache; use "
                    f"use_cache=False"
                )
            assert self._start is not None
            q, k = (self._rotated(states, forward, self._start) for states in (query, key))
            softmax, _ = call.own(q, k, value, call.mask)
            output = torch.lerp(softmax, output, self.share)
        return output, None

    def _visible(self, mask: Tensor) -> Tensor:
        """1 for each new key that queries attend to, 0 for padding, `[batch, T]` float32.

        Raises:
            PatchError: a query does not attend to all tokens before it, as with several documents in a row,
                or the mask adds to the logits.
        """
        allowed = visible(mask)
        if mask.dtype != torch.bool and not bool(((mask == 0) | ~allowed).all()):
            raise PatchError(f"{self.encoding} has no logits, but the mask of this model adds to them")
        last, ever = allowed[:, 0, -1], allowed.flatten(1, 2).any(dim=1)
        hidden = last != ever
        for start in range(0, allowed.shape[2], MASK_ROWS):
            rows = slice(start, start + MASK_ROWS)
            before = last[:, None, None, :].expand_as(allowed[:, :, rows]).tril(start)
            hidden |= (before & ~allowed[:, :, rows] & last[:, None, rows, None]).flatten(1, 2).any(dim=1)
        if bool(hidden.any()):
            raise PatchError(
                f"{self.encoding} cannot forget: each token attends to all earlier ones. So it supports "
                f"neither packed documents nor windows; give each document its own row"
            )
        return last.to(torch.float32)

    def _rotated(self, states: Tensor, forward: Forward, start: InitialRotation | None = None) -> Tensor:
        """Features, rotated by their positions; with `start`, queries and keys, rotated for softmax."""
        name = ("angles", states.device, states.dtype, start is None)
        if name not in forward.tables:
            schedule, positions = self.encoding.inner, forward.on(states.device, forward.queries)
            table, factor = (schedule.inv_freq(self.shape), 1.0) if start is None else start[1:]
            angles = angles_of(schedule, self.shape, positions, table)[:, None]
            forward.tables[name] = (
                (factor * angles.cos()).to(states.dtype), (factor * angles.sin()).to(states.dtype)
            )  # fmt: skip
        cos, sin = forward.tables[name]
        sin = -sin if self.adapter.backwards else sin
        return rotate(states, cos, sin, pairs=self.adapter.pairs, rotated=self.adapter.rotated)

    def _positions_of_past(self, queries: Tensor, past: Cache | None) -> Tensor:
        """No positions: those of earlier tokens are in the state."""
        if past is not None and cached_tokens(past) and not self._filled(past):
            raise PatchError(
                f"{self.encoding} cannot use this {type(past).__name__}: it was filled without the encoding, "
                f"or for another trained window; start from an empty cache"
            )
        if past is not None and (obstacle := vars(past).get(_OBSTACLE)):
            raise PatchError(
                f"{self.encoding} cannot use this {type(past).__name__}: {obstacle}; use use_cache=False, or "
                f"in most models a DynamicCache"
            )
        return queries[:, :0]

    def keep(self, past: Cache, forward: Forward) -> None:
        """Store the states in the cache instead of keys; if this is not possible, record why."""
        for (kind, *key), state in forward.tables.items():
            if kind not in ("state", "twice"):
                continue
            layer = past.layers[int(key[0])]
            if kind == "twice":
                vars(past)[_OBSTACLE] = f"layer {key[0]} attends several times and can hold only one state"
            elif isinstance(layer, StateLayer):
                layer.state = state
            elif type(layer) is DynamicLayer:
                past.layers[int(key[0])] = StateLayer(state, layer.get_seq_length())
            else:
                vars(past)[_OBSTACLE] = f"its {type(layer).__name__} cannot hold a state"


def _layer(module: Any, forward: Forward) -> Any:
    """The layer of a forward's cache that a module uses; None if it does not exist yet."""
    layers = [] if forward.past is None else forward.past.layers
    return layers[module.layer_idx] if module.layer_idx < len(layers) else None
