"""Linear attention in place of softmax, for every `KernelEncoding`: running sums instead of a cache of keys.

`out_m = sum_n (R_m f(q_m)) . (R_n f(k_n)) v_n / sum_n f(q_m) . f(k_n)` over n up to m, with R the rotation
and f the feature map (2104.09864, section 3.3). What all earlier tokens contribute is two sums, a matrix and
a vector per head, which take the place of keys and values in the cache. Within a few dozen tokens products
are computed directly, so that time is linear in the length, and yet it is matrices that are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from rope_extend.attention.functions import AttentionCall, attention_modules, is_dense, never_compiled
from rope_extend.attention.reader import Forward, PositionReader, seen_by
from rope_extend.attention.rotation import rotate
from rope_extend.encodings import KernelEncoding, RopeShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.families import FamilyAdapter
from rope_extend.rotary import Start, angles_of
from rope_extend.undo import UndoLog

CHUNK = 128
"""Tokens between which products are computed directly."""

_OBSTACLE = "_rope_extend_obstacle"
"""The attribute of a cache that says why it holds no states."""

State = tuple[Tensor, Tensor]
"""The sums over all tokens so far, float32: of rotated features of keys times values
`[batch, kv_heads, head_dim, value_dim]`, and of features of keys `[batch, kv_heads, head_dim]`."""


def linear_attention(
    query: Tensor, key: Tensor, turned_query: Tensor, turned_key: Tensor, value: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """Causal linear attention, and the state after it, in time linear in the number of tokens.

    Args:
        query: features `[batch, heads, T, head_dim]`, above 0.
        key: features `[batch, kv_heads, T, head_dim]`, above 0, or 0 for a token that nobody sees.
        turned_query: `query`, rotated.
        turned_key: `key`, rotated.
        value: `[batch, kv_heads, T, value_dim]`.
        state: the sums over the tokens before; None if there were none.

    Returns:
        `[batch, heads, T, value_dim]` float32, and the sums with these tokens.
    """
    groups = query.shape[1] // key.shape[1]
    heads = (len(query), key.shape[1], groups, *query.shape[2:])
    query, turned_query = query.reshape(heads), turned_query.reshape(heads)
    value = value.to(torch.float32)
    if state is None:
        state = (
            key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]),
            key.new_zeros(*key.shape[:2], key.shape[-1]),
        )
    products, sums = state
    outputs = []
    for start in range(0, key.shape[2], CHUNK):
        here = slice(start, start + CHUNK)
        k, turned_k, v = key[:, :, here], turned_key[:, :, here], value[:, :, here]
        q, turned_q = query[:, :, :, here], turned_query[:, :, :, here]
        inside = (turned_q @ turned_k[:, :, None].mT).tril()
        shares = (q @ k[:, :, None].mT).tril()
        above = inside @ v[:, :, None] + turned_q @ products[:, :, None]
        below = shares.sum(dim=-1) + (q @ sums[:, :, None, :, None]).squeeze(-1)
        # Nothing to see, as for padding: 0 / 0 is nothing.
        outputs.append(above / torch.where(below == 0, 1.0, below)[..., None])
        products = products + turned_k.mT @ v
        sums = sums + k.sum(dim=2)
    return torch.cat(outputs, dim=3).flatten(1, 2), (products, sums)


class StateLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer of a cache that holds the state of linear attention, and no keys.

    Args:
        state: the sums over all tokens so far.
        seen: how many they were.
    """

    is_sliding = False

    def __init__(self, state: State, seen: int) -> None:
        super().__init__()
        self.state = state
        self.seen = seen
        self.keys = self.values = state[1].new_empty(0)  # some families look whether there are any
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the layer comes with a state."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values alone; the state is theirs as well once the forward is over."""
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are for the new keys."""
        return query_length, self.seen

    def get_seq_length(self) -> int:
        """How many tokens were seen."""
        return self.seen

    def get_max_length(self) -> int:
        """There is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.seen = tuple(torch.zeros_like(each) for each in self.state), 0  # type: ignore[assignment]

    def crop(self, tokens_to_remove: int) -> None:
        """Refused.

        Raises:
            PatchError: always.
        """
        raise PatchError("linear attention keeps a sum of all tokens, from which none can be taken out again")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows."""
        products, sums = self.state
        self.state = products[indices.to(products.device)], sums[indices.to(sums.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        products, sums = self.state
        self.state = products.repeat_interleave(repeats, dim=0), sums.repeat_interleave(repeats, dim=0)

    def offload(self) -> None:
        """Nothing: it is small."""

    def prefetch(self) -> None:
        """Nothing: it is where it was."""


class LinearReader(PositionReader):
    """Computes linear attention in place of a model's own, for one patch of one model.

    Args:
        encoding: the feature map and the rotation.
        shape: the rotary shape of the model.
        adapter: the model's family.
    """

    encoding: KernelEncoding

    def __init__(self, encoding: KernelEncoding, shape: RopeShape, adapter: FamilyAdapter) -> None:
        super().__init__(encoding, adapter)
        self.shape = shape
        self.start: Start | None = None  # what softmax is rotated by while the model is annealed
        self._open = False  # whether a forward goes on, and not its layers once more for the backward pass

    @never_compiled
    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder: find the cache."""
        super().before(decoder, args, kwargs)
        self._open = True

    @never_compiled
    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the decoder: leave the states with the cache."""
        self._open = False
        super().after(decoder, args, kwargs, output)

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Put this reader into a decoder, in place of any other.

        Raises:
            UnsupportedModelError: the family or its attention cannot be replaced.
        """
        super().install(decoder, undo)
        for module in filter(self.acts_on, attention_modules(decoder)):
            if _has_window(module):
                raise UnsupportedModelError(
                    f"{self.encoding} sees all earlier tokens, and {type(module).__name__} of this "
                    f"{decoder.config.model_type} model only a window of them"
                )
            if not is_dense(module.config._attn_implementation):
                raise UnsupportedModelError(
                    f"{self.encoding} reads padding from a mask that {module.config._attn_implementation} "
                    f"does not have; load the model with attn_implementation='sdpa' or 'eager'"
                )

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Linear attention; there are no weights to return.

        Raises:
            PatchError: what has no meaning without softmax is asked for, or the cache cannot hold a state.
        """
        for name in ("dropout", "softcap", "s_aux", "output_attentions"):
            given = call.kwargs.get(name)
            if isinstance(given, Tensor) or given:
                raise PatchError(f"{self.encoding} has no softmax, and {name} has no meaning without")
        forward, module = self.placed(call), call.module
        query, key, value = call.query, call.key, call.value
        new, layer = query.shape[2], self._layer(module)
        state = layer.state if isinstance(layer, StateLayer) else None
        key, value = key[:, :, :new], value[:, :, :new]  # what is behind are empty slots
        q, k = self.encoding.features(query), self.encoding.features(key)
        if isinstance(call.mask, Tensor):
            k = k * self._seen(call.mask[..., :new])[:, None, :, None]
        output, state = linear_attention(
            q, k, self._turned(q, forward), self._turned(k, forward), value, state
        )
        if self._open:
            where = ("twice" if ("state", module.layer_idx) in forward.tables else "state", module.layer_idx)
            forward.tables[where] = tuple(each.detach() for each in state)
        output = output.to(value.dtype).transpose(1, 2).contiguous()
        if self.share != 1:
            if layer is not None and layer.get_seq_length() > new:
                raise PatchError(f"{self.encoding} is mixed with softmax, which no cache goes on from")
            assert self.start is not None
            q, k = (self._turned(states, forward, self.start) for states in (query, key))
            softmax, _ = call.own(q, k, value, call.mask)
            output = torch.lerp(softmax, output, self.share)
        return output, None

    def _layer(self, module: Any) -> Any:
        """The layer of the present cache that a module reads, if it is there yet."""
        layers = [] if self._past is None else self._past.layers
        return layers[module.layer_idx] if module.layer_idx < len(layers) else None

    def _seen(self, mask: Tensor) -> Tensor:
        """Which of the new keys are seen at all, `[batch, T]` float32.

        Raises:
            PatchError: a query does not see what an earlier one saw, as where documents share a row, or the
                mask weighs what it lets through.
        """
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        if mask.dtype != torch.bool and not bool(((mask == 0) | ~allowed).all()):
            raise PatchError(f"{self.encoding} has no logits, and this model's mask adds to them")
        last, ever = allowed[:, 0, -1], allowed[:, 0].any(dim=1)
        if not bool((last == ever).all()):
            raise PatchError(
                f"{self.encoding} cannot forget: a token that was seen once is seen by all that follow, so "
                f"there is no packing of documents into a row, nor a window; give each document its own row"
            )
        return last.to(torch.float32)

    def _turned(self, states: Tensor, forward: Forward, start: Start | None = None) -> Tensor:
        """Features, rotated by where they stand; or queries and keys, as softmax has them."""
        wanted = ("angles", states.device, states.dtype, start is None)
        if wanted not in forward.tables:
            schedule, positions = self.encoding.inner, forward.queries.to(states.device)
            table, factor = (schedule.inv_freq(self.shape), 1.0) if start is None else start[1:]
            angles = angles_of(schedule, self.shape, positions, table)[:, None]
            forward.tables[wanted] = (
                (factor * angles.cos()).to(states.dtype), (factor * angles.sin()).to(states.dtype)
            )  # fmt: skip
        cos, sin = forward.tables[wanted]
        sin = -sin if self.adapter.backwards else sin
        return rotate(states, cos, sin, pairs=self.adapter.pairs, rotated=self.adapter.rotated)

    def _positions_of_past(self, queries: Tensor) -> Tensor:
        """None: where earlier tokens stood is in the state."""
        past = self._past
        if seen_by(past) and getattr(past, "rope_extend_encoding", None) != self.encoding:
            raise PatchError(
                f"{self.encoding} cannot read this {type(past).__name__}: it was filled without it; start "
                f"from an empty cache"
            )
        if past is not None and (obstacle := vars(past).get(_OBSTACLE)):
            raise PatchError(
                f"{self.encoding} cannot read this {type(past).__name__}: {obstacle}; use_cache=False reads "
                f"without, and a DynamicCache serves most models"
            )
        return queries[:, :0]

    def keep(self, past: Cache) -> None:
        """Put the states into the cache, in the place of keys; where there is none, leave word why."""
        assert self._forward is not None
        for (kind, *where), state in self._forward.tables.items():
            if kind not in ("state", "twice"):
                continue
            layer = past.layers[int(where[0])]
            if kind == "twice":
                vars(past)[_OBSTACLE] = (
                    f"layer {where[0]} attends several times, and has one place for a state"
                )
            elif isinstance(layer, StateLayer):
                layer.state = state
            elif type(layer) is DynamicLayer:
                past.layers[int(where[0])] = StateLayer(state, layer.get_seq_length())
            else:
                vars(past)[_OBSTACLE] = f"there is no place for a state in its {type(layer).__name__}"


def _has_window(module: Any) -> bool:
    """Whether an attention module sees a window of the tokens before."""
    kinds = getattr(module.config, "layer_types", None)
    if kinds:
        return any(word in str(kinds[module.layer_idx]) for word in ("sliding", "chunked"))
    return any(getattr(owner, "sliding_window", None) for owner in (module, module.config))
