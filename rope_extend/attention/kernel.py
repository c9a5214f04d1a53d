"""Linear attention instead of softmax, with running sums instead of keys.

`out_m = sum_n (R_m f(q_m)) . (R_n f(k_n)) v_n / sum_n f(q_m) . f(k_n)` over n up to m, with R the rotation
and f the feature map (2104.09864, section 3.3). The contribution of all earlier tokens is two sums per head,
a matrix and a vector. They replace keys and values in the cache. Within chunks of tokens, products are
computed directly as matrices. So time is linear in the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import GIVEN, AttentionCall, attention_window, extended_modules
from rope_extend.attention.masks import MASK_ROWS, sees_later_keys, visible
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.rotation import rotate
from rope_extend.encodings import LinearAttention, RopeShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.rotary import angles_of
from rope_extend.models.undo import UndoLog

CHUNK = 128
"""Tokens of a chunk within which products are computed directly."""

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


class StateLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """A layer of a cache that holds the state of linear attention where others hold keys and values.

    Args:
        state: the sums over all tokens so far.
        seen: the number of these tokens.
        made_by: what the state follows from, the encoding and the shape of the model.
    """

    is_croppable = False

    def __init__(self, state: State, seen: int, made_by: tuple[LinearAttention, RopeShape]) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = state[0].dtype, state[0].device, True
        self.keys, self.values = state
        self.cumulative_length = seen
        self.made_by = made_by
        self.step = ""
        """In a forward: `expected` by a patched module, then `updated`, and empty again after attention."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values only; attention adds them to the state.

        Raises:
            PatchError: the model is not patched with the encoding of the state.
        """
        if self.step != "expected":
            raise PatchError(
                f"this cache was filled under {self.made_by[0]}, but the model is no longer patched with it; "
                f"start from an empty cache, or patch the model with {self.made_by[0]} again"
            )
        self.step = "updated"
        self.cumulative_length += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """The number of tokens seen."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible."""
        raise PatchError("linear attention keeps a sum of all tokens, and no token can be removed from it")


class KernelHandler(AttentionHandler):
    """Computes linear attention instead of a model's own, for one patch of one model."""

    encoding: LinearAttention
    shape: RopeShape

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Replace the attention of a decoder."""
        super().install(decoder, undo)
        for module in extended_modules(self.encoding, decoder, self.family):
            undo.hook(module, expect_update)
            if attention_window(module) is not None:
                raise UnsupportedModelError(
                    f"{self.encoding} attends to all earlier tokens, but {type(module).__name__} of this "
                    f"{decoder.config.model_type} model only to a window of them"
                )

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Linear attention, without attention weights."""
        for name in ("dropout", "softcap", "s_aux", "output_attentions"):
            value = call.kwargs.get(name)
            if isinstance(value, Tensor) or value:
                raise PatchError(f"{self.encoding} has no softmax, so {name} has no meaning; turn it off")
        forward = self.forward_of_call(call)
        query, key, value = call.query, call.key, call.value
        new, layer = query.shape[2], self._layer(call)
        state = (
            (layer.keys, layer.values) if isinstance(layer, StateLayer) and layer.keys is not None else None
        )
        key, value = key[:, :, :new], value[:, :, :new]  # the rest are empty slots
        # Layers without a state share the mask, so it covers earlier keys too.
        past = layer.get_seq_length() - new if state is not None else 0
        q, k = self.encoding.features(query), self.encoding.features(key)
        if sees_later_keys(call, forward, past + new):
            raise PatchError(
                f"{self.encoding} adds up earlier tokens, but this input lets tokens attend to later ones "
                f"(an image, a prefix or is_causal=False); use causal attention"
            )
        if call.mask is not None:
            shown = call.mask[..., past : past + new]
            visible_keys = forward.cached("visible", of=call.mask, compute=lambda: self._visible(shown))
            k = k * visible_keys[:, None, :, None].to(k.device)
        output, state = linear_attention(
            q, k, self._rotated(q, forward), self._rotated(k, forward), value, state
        )
        self._keep(call, layer, (state[0].detach(), state[1].detach()))
        return output.to(value.dtype).transpose(1, 2).contiguous(), None

    def _visible(self, mask: Tensor) -> Tensor:
        """1 for each new key that queries attend to, 0 for padding, `[batch, T]` float32."""
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

    def _rotated(self, states: Tensor, forward: Forward) -> Tensor:
        """Features, rotated by their positions."""

        def cos_and_sin() -> tuple[Tensor, Tensor]:
            schedule, positions = self.encoding.inner, forward.on(states.device, forward.queries)
            angles = angles_of(schedule, self.shape, positions, schedule.inv_freq(self.shape))[:, None]
            cos, sin = (each.to(states.device, states.dtype) for each in (angles.cos(), angles.sin()))
            return cos, sin

        cos, sin = forward.cached("angles", states.device, states.dtype, compute=cos_and_sin)
        return rotate(states, cos, sin, self.family)

    def _layer(self, call: AttentionCall) -> Any:
        """The layer of the cache that a call uses; None if there is no cache."""
        past = call.given.get("cache")
        if past is None:
            return None
        layer, reason = past.layers[call.module.layer_idx], ""
        if isinstance(layer, StateLayer):
            if layer.made_by != (self.encoding, self.shape):
                reason = f"it was filled under {layer.made_by[0]}, for {layer.made_by[1]}"
            elif layer.step != "updated":
                reason = "several modules use one layer of it, which can hold only one state"
        elif layer.get_seq_length() > call.query.shape[2]:
            reason = "it was filled without the encoding"
            if type(layer) is not DynamicLayer:
                reason = f"its {type(layer).__name__} cannot hold a state"
        if reason:
            raise PatchError(
                f"{self.encoding} cannot use this {type(past).__name__}: {reason}; start from an empty "
                f"cache, in most models a DynamicCache, or use use_cache=False"
            )
        return layer

    def _keep(self, call: AttentionCall, layer: Any, state: State) -> None:
        """Store a state in the cache instead of keys."""
        if type(layer) is DynamicLayer:
            layer = StateLayer(state, layer.get_seq_length(), (self.encoding, self.shape))
            call.given["cache"].layers[call.module.layer_idx] = layer
        elif isinstance(layer, StateLayer):
            (layer.keys, layer.values), layer.step = state, ""


def expect_update(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention module: let its layer of the cache that it was given be updated."""
    layers, index = getattr(kwargs.get(GIVEN, {}).get("cache"), "layers", []), int(module.layer_idx)
    if index < len(layers):
        layers[index].step = "expected"
