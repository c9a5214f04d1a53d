"""Vectors added to the input of the first layer, for every `AbsoluteEncoding`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rope_extend.attention.functions import HANDLER
from rope_extend.attention.positions import AttentionHandler, positions_among
from rope_extend.attention.registry import Inputs, never_compiled
from rope_extend.encodings import AbsoluteEncoding, ModelShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.decoders import decoder_layers
from rope_extend.models.undo import UndoLog


class VectorHandler(AttentionHandler):
    """Adds a vector for its position to each token's embedding, for one patch of one model.

    The vectors are added before the first layer. The embedding module does not know positions, and is not
    used if a model gets `inputs_embeds`.
    """

    encoding: AbsoluteEncoding
    shape: ModelShape

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Add the vectors before the first layer of a decoder."""
        layers, model_type = decoder_layers(decoder), decoder.config.model_type
        several = model_type in self.family.several_streams
        if layers is None or several:
            reason = "is several streams, not one," if several else "rope_extend does not find"
            raise UnsupportedModelError(
                f"{self.encoding} is added to the input of the first layer, which {reason} in {model_type}; "
                f"a rotary schedule works, such as yarn"
            )
        layer = layers.layers[0]
        undo.set(layer, HANDLER, self)
        undo.hook(layer, self.add)

    @never_compiled
    def add(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Forward pre-hook of the first layer: add the vectors to its hidden states `[batch, T, hidden]`."""
        if getattr(layer, HANDLER, None) is not self:
            return None
        position_ids = positions_among((args, kwargs))
        states = args[0] if args else kwargs.get("hidden_states")
        if position_ids is None or not isinstance(states, Tensor) or states.dim() != 3:
            raise PatchError(
                f"{self.encoding} cannot be added to the input of {type(layer).__name__}: it is not "
                f"[batch, tokens, channels], or its positions are not known"
            )
        forward = self.forward_at(position_ids, layer)
        positions = forward.queries
        if positions.shape[1] != states.shape[1]:
            raise PatchError(
                f"{self.encoding} does not know the positions in {type(layer).__name__}: it has "
                f"{states.shape[1]} tokens, and the rotary module got {positions.shape[1]} positions"
            )
        learned = {} if self.learned is None else self.learned.of()
        learned = {name: value.to(states.device) for name, value in learned.items()}
        vectors = self.encoding.vectors(self.shape, forward.on(states.device, positions), learned)
        states = states + vectors.to(states.dtype)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})
