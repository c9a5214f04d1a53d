"""One window over several processes: each has a share of the tokens, and in attention a share of the heads.

Around each attention function, queries, keys and values of a share of the positions and all heads are
exchanged for those of all positions and a share of the heads (2309.14509). So attention of every kind sees
whole rows, and whatever acts inside it is unchanged: a table that follows the length, a position map, a bias,
a sliding window. Everything else in a decoder treats tokens one by one, and runs on the share alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import create_masks_for_generate

from rope_extend.attention.foreign_splits import SINKS, check_shareable, ring_mesh, ulysses
from rope_extend.attention.functions import (
    HANDLER,
    HEADS,
    AttentionCall,
    HandlerConfig,
    attention_modules,
    handing_over,
    model_config,
)
from rope_extend.attention.registry import Inputs, never_compiled
from rope_extend.errors import PatchError, RopeExtendError, UnsupportedModelError, refuse_if
from rope_extend.loss import causal_lm, decoder_name
from rope_extend.models.decoders import CACHE
from rope_extend.models.undo import Removable

_WHOLE = "_rope_extend_whole"
"""The attribute of inputs of a layer by which it finds its window when it is computed again."""
_SPLIT = "_rope_extend_split_window"
"""The attribute of a decoder with its `SplitWindow`; also of keys and caches with a share of the heads."""
_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Inputs of a decoder with an entry for each token, besides positions."""
_KNOWN = (*_INPUTS, "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k")


class Processes:
    """The processes that share a window, and what they send each other.

    Args:
        group: the process group; None for a dry run, in which process 0 sends to itself.
        size: number of processes of a dry run.

    Attributes:
        rank: the number of this process in the group.
    """

    def __init__(self, group: Any, size: int = 1) -> None:
        self.group, self.size, self.rank = group, size, 0
        if group is not None:
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def __deepcopy__(self, memo: Any) -> Processes:
        return self

    def own(self, whole: Tensor, *, dim: int = 1, fill: int = 0) -> Tensor:
        """The share of this process, an equal part of a dimension, which is padded on the right."""
        share = -(-whole.shape[dim] // self.size)
        after = [0] * (2 * (whole.dim() - dim - 1))
        padded = functional.pad(whole, (*after, 0, share * self.size - whole.shape[dim]), value=fill)
        return padded.narrow(dim, self.rank * share, share)

    def gathered(self, own: Tensor, dim: int = 1) -> Tensor:
        """The shares of all processes, one after the other. Gradients come back to their process.

        They are multiplied by the number of processes, over which training averages them.
        """
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.size)]
        if self.group is not None:
            dist.all_gather(parts, own.detach().contiguous(), group=self.group)
        parts[self.rank] = own
        if own.requires_grad and torch.is_grad_enabled():
            parts[self.rank] = own.view_as(own)
            parts[self.rank].register_hook(lambda gradient: gradient * self.size)  # type: ignore[no-untyped-call]
        return torch.cat(parts, dim=dim)

    def heads_of(self, states: Tensor, tokens: int) -> Tensor:
        """States `[batch, heads, share, dim]` of own tokens as those of own heads, `[batch, ., tokens, dim]`.

        Key heads that are fewer than the processes are repeated: each process gets those of its queries.
        """
        if repeat := math.lcm(states.shape[1], self.size) // states.shape[1] - 1:
            states = states.repeat_interleave(repeat + 1, dim=1)
        heads: Tensor = _Exchange.apply(states, self, 1, 2)  # type: ignore[no-untyped-call]
        return heads[:, :, :tokens]

    def tokens_of(self, output: Tensor) -> Tensor:
        """Outputs `[batch, tokens, own heads, dim]` as those of own tokens, `[batch, share, heads, dim]`."""
        padded = functional.pad(output, (0, 0, 0, 0, 0, -output.shape[1] % self.size))
        tokens: Tensor = _Exchange.apply(padded, self, 1, 2)  # type: ignore[no-untyped-call]
        return tokens


class _Exchange(torch.autograd.Function):
    """Cuts a dimension into parts, one for each process, and joins those that this process gets."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, processes: Processes, split: int, join: int) -> Tensor:
        ctx.arguments = processes, join, split
        sent = torch.stack(states.chunk(processes.size, dim=split))
        received = torch.empty_like(sent)
        if processes.group is None:
            received.copy_(sent)
        else:
            dist.all_to_all_single(received, sent, group=processes.group)
        return torch.cat(received.unbind(0), dim=join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradient, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


@dataclass
class WholeWindow:
    """The whole window of one forward, of which each process has a share.

    Attributes:
        tokens: its length, of a chunk with a cache that of the chunk.
        positions: those of all tokens, `[1 or batch, tokens]`, or with parts.
        masks: the mask of all pairs, by layer type if there are several; None for plain causal attention.
    """

    tokens: int
    positions: Tensor
    masks: Any

    def mask_of(self, module: Any) -> Any:
        """The mask of an attention module."""
        if not isinstance(self.masks, dict):
            return self.masks
        return self.masks[model_config(module).layer_types[module.layer_idx]]


class SplitHandler:
    """Stands between an attention module and the handler of its patch, if it has one.

    Args:
        inner: that handler; None without one.
        processes: those that share a window.
    """

    def __init__(self, inner: Any, processes: Processes) -> None:
        self.inner, self.processes = inner, processes

    def check_implementation(self, implementation: str) -> None:
        """Refuse implementations that the inner handler refuses."""
        if self.inner is not None:
            self.inner.check_implementation(implementation)

    def attended(self, module: Any) -> None:
        """After an attention module."""
        if self.inner is not None:
            self.inner.attended(module)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention with the heads of this process to the whole window; without one, as usual."""
        window = call.given.get("window")
        if window is None:
            return self._attend(call)
        processes, heads = self.processes, call.query.shape[1]
        name, own_bias = type(call.module).__name__, call.kwargs.get("position_bias")
        if heads % processes.size or not call.is_causal or own_bias is not None:
            raise PatchError(
                f"split_window: {name} with {heads} heads cannot be shared by {processes.size} processes: "
                "their number must divide the heads, and attention must be causal and without an own bias"
            )
        query, key, value = processes.heads_of(call.query, window.tokens), call.key, call.value
        if not getattr(key, _SPLIT, False):  # those of a shared cache have been exchanged
            key, value = (processes.heads_of(each, window.tokens) for each in (key, value))
        first, kwargs = processes.rank * query.shape[1], dict(call.kwargs)
        if self.inner is not None or "position_ids" in kwargs:
            kwargs["position_ids"] = window.positions
        output, _ = self._attend(
            replace(
                call, query=query, key=key, value=value, mask=window.mask_of(call.module), kwargs=kwargs,
                inner=partial(_of_some_heads, call.inner, slice(first, first + query.shape[1])),
                given={**call.given, HEADS: (first, heads)},
            ).with_full_mask()
        )  # fmt: skip
        return processes.tokens_of(output), None

    def _attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if self.inner is None:
            return call.own(call.query, call.key, call.value, call.mask)
        attended: tuple[Tensor, Tensor | None] = self.inner.attend(call)
        return attended


def _of_some_heads(
    inner: Callable[..., Any], heads: slice, module: Any, query: Tensor, key: Tensor, *args: Any, **more: Any
) -> Any:
    """A model's own attention function, for the heads of this process.

    Such functions look at their module for the queries of each key, and for sinks, one for each head. So they
    get a second view of it, with the same tensors.
    """
    view = object.__new__(type(module))
    view.__dict__ = {**vars(module), "_parameters": dict(module._parameters)}
    view.__dict__["num_key_value_groups"] = query.shape[1] // key.shape[1]
    if getattr(module, SINKS, None) is not None:
        view._parameters[SINKS] = more["s_aux"] = getattr(module, SINKS)[heads]
    return inner(view, query, key, *args, **more)


def split_window(model: nn.Module, group: Any = None) -> SplitWindow:
    """Let several processes share each window: each has a part of the tokens, and in attention of the heads.

    Every process calls the model with the same whole batch, and gets the output of the whole. Inside,
    each has an equal part of the tokens, so that activations take a part of the memory. Gradients averaged
    over the processes, as data parallel training does, are those of the whole. `chunked_loss` and
    `perplexity` compute a part of the losses in each process. Forwards with a cache, as in `generate`, are
    not shared. `remove()`, or the end of a `with` block, undoes it.

    Works for every method, and for families in which only attention mixes tokens. The length need not be a
    multiple of the number of processes; the number of heads must be.

    Args:
        model: a causal language model of transformers; extend it before.
        group: the `torch.distributed` group of the processes; all processes if not given.

    Raises:
        RopeExtendError: there are no other processes, or they cannot share the heads of the model.
        UnsupportedModelError: the family mixes tokens elsewhere, or follows the length in another way.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RopeExtendError(
            "split_window: this process has not been connected with others; start several with torchrun "
            "--nproc-per-node N, and call torch.distributed.init_process_group() or make the Trainer first"
        )
    processes = Processes(dist.group.WORLD if group is None else group)
    check_split(model, processes.size)
    return SplitWindow(causal_lm(model), processes)


def check_split(model: nn.Module, processes: int) -> None:
    """Refuse a model of which several processes cannot share a window; it may be on the meta device.

    Raises:
        RopeExtendError: says why, and what to do instead.
    """
    lm = causal_lm(model)
    refuse_if(current_split(model) is not None, "split_window: the model is split already; remove() it first")
    refuse_if(processes < 2, "split_window: there is one process only; start several with torchrun")
    check_shareable(lm, lm._modules[decoder_name(lm)], processes)


def current_split(model: nn.Module) -> SplitWindow | None:
    """The `SplitWindow` that is active on a causal language model; None without one."""
    lm = causal_lm(model)
    return getattr(lm._modules[decoder_name(lm)], _SPLIT, None)


class SplitWindow(Removable):
    """The change that `split_window` made; also a context manager that undoes it.

    Attributes:
        model: the causal language model, without PEFT around it.
        processes: those that share a window.
        running: the window of the forward that is running; None between forwards.
    """

    def __init__(self, lm: Any, processes: Processes) -> None:
        self.model, self.processes = lm, processes
        self._decoder: Any = lm._modules[decoder_name(lm)]
        self._modules = attention_modules(self._decoder)
        self.running: WholeWindow | None = None
        self._gathers = True
        self._handlers = [SplitHandler(getattr(each, HANDLER, None), processes) for each in self._modules]
        self._configs = [module.config for module in self._modules]
        views = {id(config): HandlerConfig(config) for config in map(model_config, self._modules)}
        for module, handler in zip(self._modules, self._handlers, strict=True):
            setattr(module, HANDLER, handler)
            module.config = views[id(model_config(module))]
        self._labels: list[Tensor] = []
        self._hooks = [
            lm.register_forward_pre_hook(self._note_labels, with_kwargs=True),
            self._decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            self._decoder.register_forward_hook(self._after, always_call=True),
            *(each.register_forward_pre_hook(self._hand_over, with_kwargs=True) for each in self._modules),
        ]
        setattr(self._decoder, _SPLIT, self)

    def remove(self) -> None:
        """Let each process run the whole model again. Removing twice does nothing."""
        if getattr(self._decoder, _SPLIT, None) is not self:
            return
        delattr(self._decoder, _SPLIT)
        for hook in self._hooks:
            hook.remove()
        for module, handler, config in zip(self._modules, self._handlers, self._configs, strict=True):
            if vars(module).get(HANDLER) is handler:  # not so under a later patch
                setattr(module, HANDLER, handler.inner)
                module.config = config

    def same_batches(self, trainer: Any) -> None:
        """Let a `Trainer` give the processes that share a window the same batches, to train and to evaluate.

        They count as one process, so batches, their order and metrics are those of as many processes as there
        are groups, also of a resumed run; each reads a stream by itself, as with `dispatch_batches=False`.
        The processes of a group must have consecutive ranks.

        Args:
            trainer: transformers' `Trainer`, one built on it, or accelerate's `Accelerator`, of which this
                changes the loaders that are made later. Calling it again does nothing.

        Raises:
            RopeExtendError: accelerate has not connected the processes.
        """
        accelerator = getattr(trainer, "accelerator", trainer)
        found, connected = accelerator.num_processes, dist.get_world_size()
        refuse_if(
            found != connected,
            f"split_window: {connected} processes are connected, but accelerate found {found}, so each would "
            "train alone; start them with torchrun --nproc-per-node N, on a CPU with ACCELERATE_USE_CPU=true",
        )
        group = object.__new__(_group_as_one(type(accelerator), self.processes.size))
        group.__dict__ = accelerator.__dict__
        for name in ("prepare_data_loader", "gather_for_metrics"):
            setattr(accelerator, name, partial(self._while_split, group, accelerator, name))
        if hasattr(trainer, "gather_function"):
            trainer.gather_function = accelerator.gather_for_metrics

    def _while_split(self, group: Any, accelerator: Any, name: str, *args: Any, **options: Any) -> Any:
        """A method of an accelerator, or while the model is split that of its group."""
        instance = group if getattr(self._decoder, _SPLIT, None) is self else accelerator
        return getattr(type(instance), name)(instance, *args, **options)

    @contextmanager
    def own_share(self) -> Iterator[Processes]:
        """Inside the block, forwards of the decoder give the hidden states of this process's tokens only."""
        self._gathers = False
        try:
            yield self.processes
        finally:
            self._gathers = True

    def summed(self, part: Tensor) -> Tensor:
        """The sum of a loss over the processes; for its gradient see `Processes.gathered`."""
        total = part.detach().clone()
        if self.processes.group is not None:
            dist.all_reduce(total, group=self.processes.group)
        return total + self.processes.size * (part - part.detach())

    def share_cache(self, cache: Any) -> Any:
        """A new cache, changed to hold the heads of this process; forwards with it are shared."""
        setattr(cache, _SPLIT, True)
        for layer in cache.layers:
            layer.update = MethodType(_update_shared(type(layer).update, self), layer)
        return cache

    @never_compiled
    def _note_labels(self, lm: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: keep labels, which its decoder does not get."""
        given = (kwargs.get(name) for name in ("labels", "shift_labels"))
        self._labels = [labels for labels in given if isinstance(labels, Tensor)]

    @never_compiled
    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Forward pre-hook of the decoder: give it the tokens of this process."""
        cache, labels = kwargs.get(CACHE), self._labels
        self._labels = []
        if cache is not None and not getattr(cache, _SPLIT, False):
            return None
        kwargs = {**({"input_ids": args[0]} if args else {}), **kwargs}
        self._check(kwargs, args[1:])
        given = {name: kwargs[name] for name in _INPUTS if kwargs.get(name) is not None}
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        first = next(iter(given.values()))
        tokens, seen = first.shape[1], 0 if cache is None else cache.get_seq_length()
        at = torch.arange(seen, seen + tokens, device=first.device)[None] if positions is None else positions
        masks = [mask] if isinstance(mask, Tensor) and mask.dim() == 2 else []
        self._check_equal(first, at, *masks, *labels)
        self.running = WholeWindow(tokens, at, self._masks(first, mask, positions, cache))
        own = {name: self.processes.own(value) for name, value in given.items()}
        own["position_ids"] = self.processes.own(at, dim=at.dim() - 1)
        # Without a mask, transformers would take gaps in the positions for borders between documents.
        shown = None if positions is None else at.new_ones(own["position_ids"].shape[-2:])
        return (), {**kwargs, **own, "attention_mask": shown, "use_cache": cache is not None}

    def _masks(self, first: Tensor, mask: Any, positions: Tensor | None, cache: Any) -> Any:
        """The masks of the whole window, as the decoder of one process would make them."""
        if isinstance(mask, dict) or (mask is not None and mask.dim() > 2):
            return mask
        config = self.model.config.get_text_config(decoder=True)
        like = first.new_empty(*first.shape[:2], 0, dtype=self.model.dtype)
        documents = None if positions is None or positions.dim() == 3 else positions
        try:
            masks = create_masks_for_generate(config, like, mask, cache, position_ids=documents)
        except TypeError:  # for layers that see chunks, in transformers 5.17
            masks = None
        if getattr(config, "layer_types", None) and not isinstance(masks, dict):
            raise UnsupportedModelError(
                f"split_window: transformers {transformers.__version__} does not make the masks of "
                f"{config.model_type} before its layers; train it whole, or with another version"
            )
        return masks

    def _check(self, kwargs: dict[str, Any], others: tuple[Any, ...]) -> None:
        """Refuse inputs that cannot be cut, and a model that was patched later."""
        handlers = [getattr(module, HANDLER, None) for module in self._modules]
        if any(mine is not now for mine, now in zip(self._handlers, handlers, strict=True)):
            raise PatchError(
                "split_window: the model was patched after the split; call remove(), then split_window again"
            )
        if ring_mesh() is not None or ulysses(self._decoder):
            raise PatchError(
                "split_window: another library shares the sequence too; start without cp_size and sp_size"
            )
        sized = [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.dim()]
        unknown = [name for name in sized if name not in _KNOWN]  # not the number of labels, from Trainer
        for name in ("output_attentions", "output_hidden_states"):
            asked = kwargs.get(name)
            if asked or (asked is None and getattr(self._decoder.config, name, False)):
                unknown.append(name)
        if unknown or others:
            raise PatchError(
                f"split_window: {', '.join(unknown) or 'inputs without a name'} cannot be shared by several "
                "processes; leave them out, or remove() the split"
            )

    def _check_equal(self, *inputs: Tensor) -> None:
        """Refuse batches that differ between the processes, before they wait for each other in vain."""
        if self.processes.group is None:
            return
        digest = 0
        for each in inputs:
            digest = zlib.crc32(repr(each.shape).encode(), digest)
            digest = zlib.crc32(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest)
        everyone = self.processes.gathered(torch.tensor([[digest]], device=self.model.device))
        if bool((everyone != digest).any()):
            raise RopeExtendError(
                "split_window: the processes that share a window got different batches; give each the same, "
                "in a Trainer by split.same_batches(trainer)"
            )

    @never_compiled
    def _after(self, decoder: Any, args: Any, output: Any) -> Any:
        """Forward hook of the decoder: gather the states of all tokens."""
        window, self.running = self.running, None
        if window is None or output is None or not self._gathers:
            return None
        own = output[0] if isinstance(output, tuple) else output.last_hidden_state
        states = self.processes.gathered(own)[:, : window.tokens]
        if isinstance(output, tuple):
            return states, *output[1:]
        output.last_hidden_state = states
        return output

    @never_compiled
    def _hand_over(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Forward pre-hook of an attention module: give its handler the window.

        A layer that is computed again for the backward pass finds it at its other inputs.
        """
        states = kwargs.get("hidden_states", args[0] if args else None)
        given = tree_leaves((args, kwargs))
        others = [each for each in given if isinstance(each, Tensor) and each is not states]
        window = self.running
        if window is not None:
            for each in others:
                setattr(each, _WHOLE, window)
        elif torch._C._current_graph_task_id() != -1:  # in a backward pass
            marked = [each for each in others if hasattr(each, _WHOLE)]
            if not marked:
                raise PatchError(
                    f"split_window: {type(module).__name__} is computed again for the backward pass, and "
                    "does not find its window; turn gradient checkpointing off"
                )
            window = getattr(marked[0], _WHOLE)
        return handing_over(module, (args, kwargs), window=window)


def _update_shared(update: Any, split: SplitWindow) -> Callable[..., tuple[Tensor, Tensor]]:
    """How a layer of a cache takes keys and values of this process's tokens: it keeps those of its heads."""

    def shared(layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        window = split.running
        assert window is not None
        own = (split.processes.heads_of(each, window.tokens) for each in (keys, values))
        keys, values = update(layer, *own, *args, **kwargs)
        keys = keys.view_as(keys)
        setattr(keys, _SPLIT, True)
        return keys, values

    return shared


def _group_as_one(kind: Any, size: int) -> Any:
    """A kind of `Accelerator` that takes the processes of a group for one."""
    from accelerate.utils import recursively_apply

    class GroupAsOne(kind):  # type: ignore[misc]
        dispatch_batches, torch_device_mesh = False, None  # by which it would deal batches out otherwise

        @property
        def num_processes(self) -> int:
            return int(super().num_processes) // size

        @property
        def process_index(self) -> int:
            return int(super().process_index) // size

        def gather(self, tensor: Any) -> Any:
            def of_first(every: Tensor) -> Tensor:
                return torch.cat(every.chunk(self.num_processes * size)[::size])

            return recursively_apply(of_first, super().gather(tensor))

        def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
            try:
                recursively_apply(lambda each: each, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
            if use_gather_object and super().process_index % size:
                input_data = input_data[:0]
            return super().gather_for_metrics(input_data, use_gather_object)

    return GroupAsOne
