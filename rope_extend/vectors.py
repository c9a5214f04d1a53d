"""Vectors added to what the first layer reads, for every `AbsoluteEncoding`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rope_extend.attention.functions import READER, never_compiled
from rope_extend.attention.reader import PositionReader
from rope_extend.encodings import AbsoluteEncoding, ModelShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.families import FamilyAdapter
from rope_extend.learned import LearnedParameters
from rope_extend.undo import UndoLog


class VectorReader(PositionReader):
    """Adds a vector for its position to each token's embedding, for one patch of one model.

    At the first layer rather than at the embedding itself: that knows no positions, and is passed by where a
    model is given `inputs_embeds`.

    Args:
        encoding: which vectors.
        shape: the numbers they follow from.
        adapter: the model's family.

    Attributes:
        learned: what the encoding learns; None if nothing.
    """

    encoding: AbsoluteEncoding

    def __init__(self, encoding: AbsoluteEncoding, shape: ModelShape, adapter: FamilyAdapter) -> None:
        super().__init__(encoding, adapter)
        self.shape = shape
        self.learned: LearnedParameters | None = None

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Put this reader into a decoder, in place of any other.

        Raises:
            UnsupportedModelError: the family's layers are not where they are looked for.
        """
        layer = first_layer(decoder, self.adapter)
        if layer is None:
            raise UnsupportedModelError(
                f"{self.encoding} is added to what the first layer reads, and rope_extend does not find that "
                f"layer in {decoder.config.model_type}; a rotary schedule works, such as yarn"
            )
        self.watch(decoder, undo)
        undo.set(layer, READER, self)
        layer.register_forward_pre_hook(self.add, with_kwargs=True)

    def leave(self, decoder: Any) -> None:
        """Take the hooks off a decoder and its first layer."""
        super().leave(decoder)
        layer = first_layer(decoder, self.adapter)
        if layer is not None:
            super().leave(layer)

    @never_compiled
    def add(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of the first layer: add the vectors to its hidden states `[batch, T, hidden]`.

        Raises:
            PatchError: there are no such states, or nobody has told where the tokens stand.
            RopeExtendError: a position that has no vector.
        """
        if getattr(layer, READER, None) is not self or self.share == 0:
            return None
        position_ids = kwargs.get("position_ids")
        if self._forward is None and position_ids is not None:
            self.begin(position_ids)  # the rotary module is inside the layer, and was not asked yet
        states = args[0] if args else kwargs.get("hidden_states")
        if self._forward is None or not isinstance(states, Tensor) or states.dim() != 3:
            raise PatchError(
                f"{self.encoding} cannot be added to what {type(layer).__name__} reads: it is no "
                f"[batch, tokens, channels], or comes without positions"
            )
        places = self.forward_of(position_ids).queries
        if places.shape[1] != states.shape[1]:
            raise PatchError(
                f"{type(layer).__name__} reads {states.shape[1]} tokens, and the rotary module was told of "
                f"{places.shape[1]} positions: {self.encoding} cannot place them"
            )
        learned = {} if self.learned is None else self.learned.of()
        learned = {name: value.to(states.device) for name, value in learned.items()}
        vectors = self.encoding.vectors(self.shape, places.to(states.device), learned)
        vectors = vectors if self.share == 1 else self.share * vectors
        states = states + vectors.to(states.dtype)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})


def first_layer(decoder: nn.Module, adapter: FamilyAdapter) -> nn.Module | None:
    """The first layer of a decoder, which may be the text's part of a larger model; None if it is not found.

    The list of layers is in the nearest module that holds the rotary module.
    """
    parts = adapter.rotary_paths[0].split(".")
    parts = parts[: parts.index("*")] if "*" in parts else parts
    for depth in range(len(parts) - 1, -1, -1):
        holder = decoder.get_submodule(".".join(parts[:depth]))
        for name in ("layers", "h"):
            layers = getattr(holder, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers):
                return layers[0]
    return None
