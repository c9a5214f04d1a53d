"""What makes a training step smaller: layers recomputed, their inputs in host memory, MLPs in tiles.

Each lever changes when a tensor exists, and not what is computed: gradients stay what they were. They act on
the layers of a transformers model, of any family, and are taken off again with one call.

=========================  =====================================  ==========================================
lever                      what it saves                          what it costs
=========================  =====================================  ==========================================
gradient checkpointing     all of a layer but its input           each layer once more, all but the product
                                                                  with its last frozen matrix
MLP in tiles               the MLP's wide inner states            that last product too beside checkpointing;
                                                                  alone, each MLP once more
offload of checkpoints     the inputs of the layers               copies that run beside the computation
=========================  =====================================  ==========================================
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import activations
from transformers.pytorch_utils import Conv1D

from rope_extend.errors import RopeExtendError

logger = logging.getLogger(__name__)

TILE = 1024
"""Tokens per tile of an MLP where none are asked for: enough to keep a GPU busy."""

_RECOMPUTE = "_gradient_checkpointing_func"
"""Under which name transformers gives each recomputed layer the function that does it."""

MLP_NAMES = ("mlp", "feed_forward")
"""How the decoder layers of all families call the part that mixes channels."""


@dataclass(frozen=True)
class Levers:
    """Which levers a run pulls.

    Attributes:
        gradient_checkpointing: recompute each layer in the backward pass.
        mlp_tiles: how many tokens an MLP takes at a time; 0 for all.
        offload_checkpoints: keep the inputs of the recomputed layers in host memory.

    Raises:
        RopeExtendError: inputs are to be offloaded that are not kept.
    """

    gradient_checkpointing: bool = False
    mlp_tiles: int = 0
    offload_checkpoints: bool = False

    def __post_init__(self) -> None:
        if self.offload_checkpoints and not self.gradient_checkpointing:
            raise RopeExtendError(
                "offload_checkpoints keeps the inputs of recomputed layers in host memory, and without "
                "gradient_checkpointing no layer is recomputed; set gradient_checkpointing to true or auto"
            )

    @property
    def parts(self) -> list[str]:
        """In words, each that is pulled."""
        parts = ["gradient checkpointing"] if self.gradient_checkpointing else []
        parts += [f"MLP in tiles of {self.mlp_tiles:,} tokens"] if self.mlp_tiles else []
        return parts + (["checkpoints offloaded to host memory"] if self.offload_checkpoints else [])

    def __str__(self) -> str:
        return ", ".join(self.parts) or "none"


def pull(model: Any, levers: Levers) -> ExitStack:
    """Let a transformers model train with these levers.

    Args:
        model: the model itself, with or without adapter layers in it; not a wrapper.
        levers: which.

    Returns:
        What takes them off again, by its `close` or as a context manager.

    Raises:
        RopeExtendError: the model has none of what a lever acts on.
    """
    with ExitStack() as stack:
        if levers.gradient_checkpointing and not recomputes(model):
            raise RopeExtendError(
                f"{type(model).__name__} does not recompute its layers; set gradient_checkpointing to false "
                "or auto"
            )
        set_gradient_checkpointing(model, levers.gradient_checkpointing)
        stack.callback(set_gradient_checkpointing, model, False)
        if levers.gradient_checkpointing:
            stack.enter_context(_frozen_products_last(model))
        if levers.offload_checkpoints:
            stack.enter_context(_offloaded(model))
        if levers.mlp_tiles:
            stack.enter_context(tiled(model, levers.mlp_tiles))
        return stack.pop_all()
    raise AssertionError("unreachable")


def expand_segments(wanted: bool | str) -> None:
    """Let the CUDA allocator grow its segments, so that less is lost between tensors of many sizes.

    Acts where CUDA has not started in this process; what the user's environment says about it stands.

    Args:
        wanted: True, False, or `auto` for where there is a GPU.
    """
    if wanted is False:
        return
    if not torch.cuda.is_available():
        if wanted is True:
            logger.info("expandable_segments: there is no GPU here, so it changes nothing")
        return
    name = "PYTORCH_CUDA_ALLOC_CONF"
    given = os.environ.get(name) or os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments" in given:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if wanted is True:
            logger.warning(
                "expandable_segments: CUDA has started already; set %s=expandable_segments:True before", name
            )
        return
    os.environ[name] = ",".join(filter(None, (given, "expandable_segments:True")))


# ---------------------------------------------------------------------------------------------------------
# Layers recomputed


def recomputes(model: Any) -> bool:
    """Whether transformers can recompute the layers of this model."""
    return bool(model.supports_gradient_checkpointing)


def set_gradient_checkpointing(model: Any, enabled: bool) -> None:
    """Recompute the layers of a transformers model in the backward pass, or stop doing so."""
    if not enabled and not recomputes(model):
        return
    action = "enable" if enabled else "disable"
    # Newer releases of transformers rename the methods, and warn when the old name is called.
    method = getattr(model, f"activation_checkpointing_{action}", None)
    method = method or getattr(model, f"gradient_checkpointing_{action}")
    # Not reentrant: only so do gradients reach LoRA behind a frozen embedding.
    method(*[{"use_reentrant": False}] if enabled else [])


@contextmanager
def _frozen_products_last(model: nn.Module) -> Iterator[None]:
    """Let LoRA's products with the last matrix of each layer come before the frozen one.

    A layer is recomputed up to the last tensor that it keeps. peft adds its products to the frozen one, so
    theirs would be the last that keep something, and the frozen one, a quarter of a Llama's layer, be made
    again for nothing.
    """
    last = []
    for layer in model.modules():
        if _RECOMPUTE in vars(layer):
            adapted = [part for part in layer.modules() if type(part).forward is LoraLinear.forward]
            last += [part for part in adapted[-1:] if "forward" not in vars(part)]
    for part in last:
        part.__dict__["forward"] = partial(_frozen_product_last, part)
    try:
        yield
    finally:
        for part in last:
            part.__dict__.pop("forward", None)


def _frozen_product_last(part: LoraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What `peft.tuners.lora.Linear` gives for `x`, `[..., D]`, to the bit."""
    active = [name for name in part.active_adapters if name in part.lora_A]
    if part.disable_adapters or part.merged or len(active) != 1 or active[0] in part.lora_variant or kwargs:
        return LoraLinear.forward(part, x, *args, **kwargs)
    (name,) = active
    inner = part._cast_input_dtype(x, part.lora_A[name].weight.dtype)
    added = part.lora_B[name](part.lora_A[name](part.lora_dropout[name](inner))) * part.scaling[name]
    frozen = part.base_layer(x, *args)
    return (frozen + added).to(frozen.dtype)


# ---------------------------------------------------------------------------------------------------------
# Their inputs in host memory


@contextmanager
def _offloaded(model: nn.Module) -> Iterator[None]:
    """Keep what checkpointed layers start from in host memory until they are recomputed."""
    layers = [module for module in model.modules() if _RECOMPUTE in vars(module)]
    before = [getattr(layer, _RECOMPUTE) for layer in layers]
    offload = HostOffload()
    for layer, run in zip(layers, before, strict=True):
        setattr(layer, _RECOMPUTE, partial(offload.checkpoint, run))
    try:
        yield
    finally:
        for layer, run in zip(layers, before, strict=True):
            setattr(layer, _RECOMPUTE, run)


class _Kept:
    """A tensor in host memory, and on its way back."""

    def __init__(self, tensor: Tensor, before: _Kept | None) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.before = weakref.ref(before) if before is not None else None
        self.host: Tensor | None = None
        self.back: Tensor | None = None
        self.arrived: Any = None


class HostOffload:
    """Moves the inputs of checkpointed layers to pinned host memory and back, beside the computation.

    On a GPU both ways run on a stream of their own. While a layer computes, its input leaves; while a layer
    is recomputed, the input of the one before it comes back. Two inputs are on their way at most, and the
    computation waits for the older before it goes on, so that memory is given back in the order of its
    stream, however far python runs ahead of the GPU. On a CPU, where all memory is the host's, a copy
    is kept.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._last: weakref.ref[_Kept] | None = None

    def checkpoint(self, run: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a checkpointed layer, as `torch.utils.checkpoint.checkpoint` would, with its input offloaded.

        Args:
            run: the checkpointing function.
            function: the layer's forward.
            args: its hidden states and whatever follows.
            kwargs: of the checkpointing function.
        """
        states = args[0] if args else None
        if not (isinstance(states, Tensor) and states.is_floating_point() and torch.is_grad_enabled()):
            return run(function, *args, **kwargs)
        storage = states.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Any:
            # Only the states: rotary tables and masks serve all layers, and stay where they are.
            return self._leave(tensor) if tensor.untyped_storage()._cdata == storage else tensor

        # Checkpointing saves a layer's inputs under these hooks, and has its own inside the layer.
        with saved_tensors_hooks(pack, self._return):
            return run(function, *args, **kwargs)

    def _leave(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor, self._last() if self._last is not None else None)
        self._last = weakref.ref(kept)
        if tensor.is_cuda:
            compute, side = torch.cuda.current_stream(tensor.device), self._side(tensor.device)
            kept.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            side.wait_stream(compute)
            with torch.cuda.stream(side):
                kept.host.copy_(tensor, non_blocking=True)
            self._release(1)
            self._leaving.append((tensor, side.record_event()))
        elif not tensor.is_meta:  # a rehearsal counts the device's memory only
            kept.host = tensor.clone()
        return kept

    def _return(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._release(0)
        self._fetch(kept)
        before = kept.before and kept.before()
        if before is not None:
            self._fetch(before)
        if kept.arrived is not None:
            torch.cuda.current_stream(kept.device).wait_event(kept.arrived)
        tensor, kept.back = kept.back, None
        assert tensor is not None
        return tensor

    def _fetch(self, kept: _Kept) -> None:
        """Start a tensor's way back, once."""
        if kept.back is not None:
            return
        if kept.host is None:
            kept.back = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        elif kept.device.type != "cuda":
            kept.back = kept.host
        else:
            side = self._side(kept.device)
            # Of the computation's stream, so that it may be used there, and freed, without further ado.
            kept.back = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
            side.wait_stream(torch.cuda.current_stream(kept.device))
            with torch.cuda.stream(side):
                kept.back.copy_(kept.host, non_blocking=True)
            kept.arrived = side.record_event()

    def _release(self, most: int) -> None:
        """Give back the memory of tensors that have left, but for the latest `most`."""
        while len(self._leaving) > most:
            tensor, left = self._leaving.popleft()
            torch.cuda.current_stream(tensor.device).wait_event(left)

    def _side(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


# ---------------------------------------------------------------------------------------------------------
# MLP in tiles


@dataclass(frozen=True)
class Tileable:
    """Which MLPs of a model can be run in tiles.

    Attributes:
        modules: those that surely treat each token alone.
        others: why the others are left alone, each reason once.
    """

    modules: tuple[nn.Module, ...]
    others: tuple[str, ...]


def tileable(model: nn.Module) -> Tileable:
    """Find the MLPs that can be run in tiles: those made of linear layers, norms and activations alone.

    Mixtures of experts are not among them: what their routing does with a token may depend on others.
    """
    found: list[nn.Module] = []
    reasons: dict[str, None] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in MLP_NAMES:
            reason = _not_token_wise(module)
            if reason is None:
                found.append(module)
            else:
                reasons[reason] = None
    if not found and not reasons:
        reasons[f"{type(model).__name__} has no layer called {' or '.join(MLP_NAMES)}"] = None
    return Tileable(tuple(found), tuple(reasons))


def _not_token_wise(module: nn.Module) -> str | None:
    """Why an MLP cannot be run in tiles; None if it can."""
    kind = type(module).__name__
    takes = [
        each for each in inspect.signature(module.forward).parameters.values() if each.default is each.empty
    ]
    if len(takes) != 1:
        return f"{kind} takes more than hidden states"
    if own := next((name for name, _ in module.named_parameters(recurse=False)), None):
        return f"{kind} has weights of its own, {own}"
    layers = [module]
    while layers:
        for part in layers.pop().children():
            inner = part.get_base_layer() if isinstance(part, BaseTunerLayer) else part  # of an adapter
            if not _of_one_token(inner):
                return f"{kind} holds a {type(inner).__name__}, which is not known to treat each token alone"
            if isinstance(inner, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                layers.append(inner)
    return None


def _of_one_token(part: nn.Module) -> bool:
    """Whether a part of an MLP is known to treat each token alone."""
    known = (nn.Linear, Conv1D, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential)
    if isinstance(part, known):
        return True
    home, name = type(part).__module__, type(part).__name__
    return home in (nn.modules.activation.__name__, activations.__name__) or "Norm" in name


@contextmanager
def tiled(model: nn.Module, tokens: int) -> Iterator[Tileable]:
    """Run the MLPs of a model over `tokens` at a time, and recompute each tile in the backward pass.

    Sums over tokens are then made tile by tile, and dropout draws for each tile: outputs and gradients are
    those without tiles to float32's rounding, and with dropout in an MLP those of other draws.

    Args:
        model: with or without adapter layers in it.
        tokens: per tile, counted over the batch; at least one of each sequence.

    Raises:
        RopeExtendError: none of its MLPs is known to treat each token alone.
    """
    found = tileable(model)
    if not found.modules:
        raise RopeExtendError(
            f"no MLP of {type(model).__name__} can be run in tiles: {'; '.join(found.others)}. Set mlp_tiles "
            "to auto or 0"
        )
    # An instance's forward may be another's already, such as accelerate's.
    before = [vars(module).get("forward") for module in found.modules]
    for module in found.modules:
        module.__dict__["forward"] = partial(_in_tiles, module, module.forward, tokens)
    try:
        yield found
    finally:
        for module, own in zip(found.modules, before, strict=True):
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


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
    """All tiles, one after the other, in one tensor."""
    out: Tensor | None = None
    for start, tile in _tiles(hidden, size):
        piece = run(tile)
        if out is None:
            out = piece.new_empty((*hidden.shape[:-1], piece.shape[-1]))
        out.narrow(-2, start, tile.shape[-2]).copy_(piece)
        del piece
    assert out is not None
    return out


def _tiles(hidden: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Each tile of `[..., T, D]`, and where it begins; of a rehearsal's, two, which take what all would."""
    count = hidden.shape[-2]
    for start in range(0, min(count, 2 * size) if hidden.is_meta else count, size):
        yield start, hidden.narrow(-2, start, min(size, count - start)).contiguous()


class _Keep(torch.autograd.Function):
    """Keeps the input of the tiles, as a step before them.

    Where the layer is recomputed in the backward pass, that ends with the last tensor that the layer keeps.
    Kept after the tiles, their input would have them all computed once more, only to be computed again one by
    one; kept before, it has not.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Tiles(torch.autograd.Function):
    """An MLP over tiles, of which the backward pass computes each anew and at once its gradient."""

    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, hidden: Tensor, run: Callable[[Tensor], Tensor], size: int, *trained: Tensor
    ) -> Tensor:
        ctx.kept, ctx.run, ctx.size, ctx.trained = kept.grad_fn, run, size, list(trained)
        ctx.surroundings = _Surroundings(hidden.device)
        return _joined(run, hidden, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.kept.saved_tensors
        wants_hidden = ctx.needs_input_grad[1]
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        with ctx.surroundings.again():
            for start, tile in _tiles(hidden.detach(), ctx.size):
                place = (-2, start, tile.shape[-2])
                wanted = ([tile] if wants_hidden else []) + ctx.trained
                with torch.enable_grad():
                    out = ctx.run(tile.requires_grad_(wants_hidden))
                found = list(torch.autograd.grad(out, wanted, gradient.narrow(*place), allow_unused=True))
                del out  # and its graph, before the next tile's is made
                if of_hidden is not None:
                    of_hidden.narrow(*place).copy_(found.pop(0))
                for index, part in enumerate(found):
                    if part is not None:
                        total = sums[index]
                        sums[index] = part if total is None else total + part
                del found
        return gradient.new_zeros(0), of_hidden, None, None, *sums


class _Surroundings:
    """What a computation depends on beside its inputs: autocast, and the random generators."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.casts = torch.amp.is_autocast_available(device.type)
        if self.casts:
            self.enabled = torch.is_autocast_enabled(device.type)
            self.dtype = torch.get_autocast_dtype(device.type)
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same once more; the generators go on afterwards from where they were."""
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.casts:
            autocast = torch.autocast(self.device.type, self.dtype, enabled=self.enabled)
        devices = [] if self.cuda is None else [self.device]
        with torch.random.fork_rng(devices), autocast:
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield
