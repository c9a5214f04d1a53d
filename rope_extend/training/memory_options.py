"""Memory options of training: gradient checkpointing, layers in tiles, and checkpoints in host memory.

An option changes when a tensor exists, not what is computed: gradients stay the same. The options work on the
layers of any family of transformers. LoRA's matrices of a layer share their input in any case.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from peft.helpers import disable_input_dtype_casting
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import activations
from transformers.pytorch_utils import Conv1D

from rope_extend.errors import RopeExtendError
from rope_extend.models.decoders import decoder_layers

NORM_TILES, NORM_TILE = 4, 4096
"""A tile of a norm is `NORM_TILES` times one of an MLP, which holds more: at most `NORM_TILE` tokens."""

_RECOMPUTE = "_gradient_checkpointing_func"
"""The attribute in which transformers gives each layer its checkpointing function."""


@dataclass(frozen=True)
class MemoryOptions:
    """The memory options of a run.

    Attributes:
        gradient_checkpointing: recompute each layer in the backward pass.
        mlp_tiles: number of tokens that an MLP, and a norm, computes at a time; 0 for all.
        offload_checkpoints: keep the inputs of the recomputed layers in host memory.
    """

    gradient_checkpointing: bool = False
    mlp_tiles: int = 0
    offload_checkpoints: bool = False

    @property
    def parts(self) -> list[str]:
        """The options that are on, in words."""
        parts = ["gradient checkpointing"] if self.gradient_checkpointing else []
        parts += [f"MLP in tiles of {self.mlp_tiles:,} tokens"] if self.mlp_tiles else []
        return parts + (["checkpoints offloaded to host memory"] if self.offload_checkpoints else [])

    def __str__(self) -> str:
        return ", ".join(self.parts) or "none needed"


@contextmanager
def apply_memory_options(
    model: Any, memory_options: MemoryOptions, offload: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Inside the block, a transformers model has memory options.

    Args:
        model: the model itself, with or without adapter layers; not a wrapper.
        memory_options: the options.
        offload: makes the hooks that move the inputs of layers, if the options say so; by default torch's
            `save_on_cpu`.

    Raises:
        RopeExtendError: the model does not support one of the options.
    """
    with ExitStack() as stack:
        stack.enter_context(_shared_inputs(model))
        if memory_options.gradient_checkpointing:
            stack.enter_context(_gradient_checkpointing(model))
        if memory_options.offload_checkpoints:
            offloaded = {
                layer: partial(_offloaded, offload or save_on_cpu, vars(layer)[_RECOMPUTE])
                for layer in model.modules() if _RECOMPUTE in vars(layer)
            }  # fmt: skip
            stack.enter_context(replaced(_RECOMPUTE, offloaded))
        if memory_options.mlp_tiles:
            stack.enter_context(tiled(model, memory_options.mlp_tiles))
        yield


@contextmanager
def _gradient_checkpointing(model: Any) -> Iterator[None]:
    if not model.supports_gradient_checkpointing:
        raise RopeExtendError(
            f"{type(model).__name__} does not support gradient checkpointing; set gradient_checkpointing to "
            "false or auto"
        )
    # Newer releases of transformers rename the methods, and warn about the old names.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    hooked = getattr(model, "_require_grads_hook", None) is not None
    # Not reentrant: otherwise gradients would not reach LoRA behind a frozen embedding.
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    if not hooked:
        # With an adapter, transformers makes embeddings require a gradient, for reentrant checkpointing. Then
        # they stay on the device for the whole step, and so does their gradient.
        model.disable_input_require_grads()
    try:
        yield
    finally:
        getattr(model, f"{name}_checkpointing_disable")()


def _shared_inputs(model: Any) -> AbstractContextManager[None]:
    """Let the LoRA matrices of a layer save one input under autocast, as the frozen matrices do.

    peft casts the input of each matrix to float32, and autocast casts it back. So queries, keys and values
    would each save a copy of one input. Without the two casts, the numbers are the same bit for bit, except
    with dropout between the casts.
    """
    layers = [part for part in model.modules() if isinstance(part, LoraLinear)]
    exact = model.dtype == torch.bfloat16 and not any(
        isinstance(each, nn.Dropout) for part in layers for each in part.lora_dropout.values()
    )
    context: AbstractContextManager[None] = disable_input_dtype_casting(model, active=exact)
    return context


def _offloaded(
    hooks_of: Callable[..., Any], run: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a checkpointed layer with its input in pinned host memory until the layer is recomputed.

    On a CPU, where all memory is host memory, the input stays where it is. `run` is the checkpointing
    function, and `function` the layer's forward, which takes hidden states first.
    """
    states = args[0] if args else None
    if not (isinstance(states, Tensor) and states.is_floating_point() and torch.is_grad_enabled()):
        return run(function, *args, **kwargs)
    storage, hooks = states.untyped_storage()._cdata, hooks_of(pin_memory=states.is_cuda)

    def pack(tensor: Tensor) -> Any:
        # Only the hidden states: all layers share rotary tables and masks, which stay on the device.
        return hooks.pack_hook(tensor) if tensor.untyped_storage()._cdata == storage else tensor

    def unpack(kept: Any) -> Any:
        return kept if isinstance(kept, Tensor) else hooks.unpack_hook(kept)

    # Checkpointing saves the inputs of a layer under these hooks, and uses its own inside the layer.
    with saved_tensors_hooks(pack, unpack):
        return run(function, *args, **kwargs)


@contextmanager
def replaced(name: str, functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside the block, modules have other functions under a name, as attributes of their own."""
    # An instance may already have one from elsewhere, such as accelerate.
    before = {module: vars(module).get(name) for module in functions}
    for module, function in functions.items():
        module.__dict__[name] = function
    try:
        yield
    finally:
        for module, own in before.items():
            del module.__dict__[name]
            if own is not None:
                module.__dict__[name] = own


def tileable(model: nn.Module) -> list[nn.Module]:
    """The MLPs that can run in tiles: those that consist of linear layers, norms and activations only.

    Mixtures of experts are not among them: their routing of a token may depend on other tokens.
    """
    names = (".mlp", ".feed_forward")  # in the decoder layers of all families
    return [part for name, part in model.named_modules() if name.endswith(names) and _takes_tiles(part)]


def _takes_tiles(module: nn.Module) -> bool:
    """Whether an MLP takes hidden states alone, and computes each token independently."""
    parameters = inspect.signature(module.forward).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if len(required) != 1 or any(True for _ in module.parameters(recurse=False)):
        return False
    return all(map(_is_token_wise, module.children()))


def _is_token_wise(part: nn.Module) -> bool:
    """Whether a part of an MLP computes each token independently, as far as is known."""
    part = part.get_base_layer() if isinstance(part, BaseTunerLayer) else part  # without its adapter
    if isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return all(map(_is_token_wise, part.children()))
    home, name = type(part).__module__, type(part).__name__
    known = isinstance(part, nn.Linear | Conv1D | nn.Dropout | nn.Identity)
    return known or home in (nn.modules.activation.__name__, activations.__name__) or "Norm" in name


@contextmanager
def tiled(model: nn.Module, tokens: int) -> Iterator[None]:
    """Run the MLPs and norms of a model in tiles, and recompute each tile in the backward pass.

    Norms compute in float32, and their backward pass holds several such states. Sums over tokens are computed
    tile by tile, so outputs and gradients are equal to those without tiles within the rounding of the dtype.
    Dropout in an MLP draws for each tile, so its draws differ. `tokens` of a tile are counted over the batch.

    Raises:
        RopeExtendError: no MLP of the model can run in tiles.
    """
    mlps = tileable(model)
    if not mlps:
        raise RopeExtendError(
            f"no MLP of {type(model).__name__} can run in tiles: none takes hidden states alone and consists "
            "of linear layers, norms and activations. Set mlp_tiles to auto or 0"
        )
    of_norm = min(NORM_TILES * tokens, max(tokens, NORM_TILE))
    sizes = {**dict.fromkeys(mlps, tokens), **dict.fromkeys(_norms(model), of_norm)}
    with replaced(
        "forward", {part: partial(_in_tiles, part, part.forward, size) for part, size in sizes.items()}
    ):
        yield


def _norms(model: nn.Module) -> list[nn.Module]:
    """The norms of hidden states in and behind the layers of a decoder; those inside attention are small."""
    layers = decoder_layers(model)
    modules = () if layers is None else (*layers.layers, layers.parent)
    # The name of a norm that is independent for each token. It may take more than hidden states.
    norm = re.compile("(?!.*(Batch|Group|Instance)).*Norm")
    return [
        part
        for part in (part for module in modules for part in module.children())
        if norm.match(type(getattr(part, "original_module", part)).__name__)
        and len(inspect.signature(part.forward).parameters) == 1
    ]


def _in_tiles(module: nn.Module, run: Callable[[Tensor], Tensor], tokens: int, hidden: Tensor) -> Tensor:
    """`run(hidden)` in tiles; `hidden` is `[..., T, D]`."""
    sequences = max(1, hidden[..., 0, 0].numel())
    size = max(1, tokens // sequences)
    if hidden.shape[-2] <= size:
        return run(hidden)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (hidden.requires_grad or trained):
        return _joined(run, hidden, size)
    anchor = torch.empty(0, device=hidden.device, requires_grad=True)
    kept = _Keep.apply(anchor, hidden)  # type: ignore[no-untyped-call]
    return _Tiles.apply(kept, hidden, run, size, *trained)  # type: ignore[no-untyped-call]


def _joined(run: Callable[[Tensor], Tensor], hidden: Tensor, size: int) -> Tensor:
    """Run all tiles, one after the other, into one tensor."""
    out: Any = None
    for start, tile in _tiles(hidden, size):
        piece = run(tile)
        if out is None:
            out = piece.new_empty((*hidden.shape[:-1], piece.shape[-1]))
        out.narrow(-2, start, tile.shape[-2]).copy_(piece)
        del piece
    return cast(Tensor, out)


def _tiles(hidden: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each tile of `[..., T, D]` and its offset; in a dry run only two, which need the same memory."""
    count = hidden.shape[-2]
    for start in range(0, min(count, 2 * size) if hidden.is_meta else count, size):
        yield start, hidden.narrow(-2, start, min(size, count - start)).contiguous()


class _Keep(torch.autograd.Function):
    """Saves the input of the tiles, as an operation before them.

    With gradient checkpointing, a layer is recomputed up to the last tensor that it saves. If the tiles saved
    their input themselves, all of them would be recomputed first, and then again one by one.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Tiles(torch.autograd.Function):
    """An MLP over tiles; the backward pass recomputes each tile and then computes its gradient."""

    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, hidden: Tensor, run: Callable[[Tensor], Tensor], size: int, *trained: Tensor
    ) -> Tensor:
        ctx.kept, ctx.run, ctx.size, ctx.trained = kept.grad_fn, run, size, list(trained)
        ctx.restored = _computation_context(hidden)
        return _joined(run, hidden, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.kept.saved_tensors
        needs_hidden = ctx.needs_input_grad[1]
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        with ctx.restored():
            for start, tile in _tiles(hidden.detach(), ctx.size):
                span = (-2, start, tile.shape[-2])
                inputs = ([tile] if needs_hidden else []) + ctx.trained
                with torch.enable_grad():
                    out = ctx.run(tile.requires_grad_(needs_hidden))
                parts = list(torch.autograd.grad(out, inputs, gradient.narrow(*span), allow_unused=True))
                del out  # with its graph, before the next tile is computed
                if of_hidden is not None:
                    of_hidden.narrow(*span).copy_(parts.pop(0))
                for index, part in enumerate(parts):
                    if part is not None:
                        total = sums[index]
                        sums[index] = part if total is None else total + part
                del parts
        return gradient.new_zeros(0), of_hidden, None, None, *sums


def _computation_context(hidden: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Makes a context that restores what a computation depends on apart from its inputs: autocast and the
    random generators, which afterwards continue as before."""
    kind = "cpu" if hidden.is_meta else hidden.device.type  # autocast does not know the meta device
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    cpu, (devices, states) = torch.get_rng_state(), get_device_states(hidden)

    @contextmanager
    def restored() -> Iterator[None]:
        with torch.random.fork_rng(devices), autocast:
            torch.set_rng_state(cpu)
            set_device_states(devices, states)
            yield

    return restored
