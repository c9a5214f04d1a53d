"""The inputs of checkpointed layers in pinned host memory, moved in parallel with the computation."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LARGEST_BLOCK = 2**26
"""Largest block of pinned memory in bytes. Equal blocks serve inputs of any length again."""
SMALLEST_BLOCK = 2**12
"""Smallest block of pinned memory in bytes: a page of the system."""


def pinned_blocks(size: int) -> list[int]:
    """Sizes of the blocks of pinned memory that hold `size` bytes, in bytes, the largest first.

    Each is a power of two. Torch rounds every pinned tensor up to one, so a single tensor may take twice its
    size. The sum is less than `SMALLEST_BLOCK` above `size`.
    """
    blocks, block = [], LARGEST_BLOCK
    rest = -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK
    while rest:
        blocks += [block] * (rest // block)
        rest, block = rest % block, block // 2
    return blocks


class PinnedCopy:
    """A copy of a tensor in blocks of pinned host memory.

    Args:
        tensor: the tensor, of any shape and dtype. Only its size counts here.
    """

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self._blocks = [
            torch.empty(block // size, dtype=tensor.dtype, pin_memory=True)
            for block in pinned_blocks(tensor.numel() * size)
        ]

    def store(self, flat: Tensor) -> None:
        """Start to copy a tensor `[n]` from its device."""
        for block, part in zip(self._blocks, self._parts(flat), strict=True):
            block[: len(part)].copy_(part, non_blocking=True)

    def fetch(self, flat: Tensor) -> None:
        """Start to copy the values back into a tensor `[n]` on a device."""
        for block, part in zip(self._blocks, self._parts(flat), strict=True):
            part.copy_(block[: len(part)], non_blocking=True)

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        sizes = [len(block) for block in self._blocks]
        sizes[-1:] = [flat.numel() - sum(sizes[:-1])]
        return torch.split(flat, sizes)


class _OffloadedTensor:
    """A tensor that was moved to host memory.

    Attributes:
        before: the tensor that was moved before it.
        pinned: the copy in pinned host memory, of a tensor on a GPU.
        host: the copy of a tensor on a CPU.
        back: the copy on the device, once the transfer back has started.
        arrived: CUDA event that marks the end of that transfer.
    """

    def __init__(self, tensor: Tensor, before: _OffloadedTensor | None) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.before = weakref.ref(before) if before is not None else None
        self.pinned: PinnedCopy | None = None
        self.host: Tensor | None = None
        self.back: Tensor | None = None
        self.arrived: Any = None


class HostOffload:
    """Moves the inputs of checkpointed layers to pinned host memory and back, in parallel with computation.

    On a GPU, both transfers run on a separate stream. While a layer computes, its input is copied to the
    host. While a layer is recomputed, the input of the layer before it is copied back. At most two inputs are
    in transfer, and the computation waits for the older one. So memory is freed in the order of the compute
    stream, however far Python runs ahead of the GPU. On a CPU, where all memory is host memory, a copy is
    kept. On the meta device, as many inputs are held as on a GPU.

    Attributes:
        host_bytes: bytes of pinned memory that the inputs of a dry run on the meta device would take.
    """

    def __init__(self) -> None:
        self.host_bytes = 0
        self._streams: dict[torch.device, Any] = {}
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._last: weakref.ref[_OffloadedTensor] | None = None

    @property
    def leaving_bytes(self) -> int:
        """Bytes of device memory of the inputs that are on their way to the host."""
        return sum(tensor.nbytes for tensor, _ in self._leaving)

    def checkpoint(self, run: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a checkpointed layer, as `torch.utils.checkpoint.checkpoint` would, with its input offloaded.

        Args:
            run: the checkpointing function.
            function: the layer's forward.
            args: arguments of the layer, hidden states first.
            kwargs: arguments of the checkpointing function.
        """
        states = args[0] if args else None
        if not (isinstance(states, Tensor) and states.is_floating_point() and torch.is_grad_enabled()):
            return run(function, *args, **kwargs)
        storage = states.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Any:
            # Only the hidden states: all layers share rotary tables and masks, which stay on the device.
            return self._offload(tensor) if tensor.untyped_storage()._cdata == storage else tensor

        # Checkpointing saves the inputs of a layer under these hooks, and uses its own inside the layer.
        with saved_tensors_hooks(pack, self._return):
            return run(function, *args, **kwargs)

    def _offload(self, tensor: Tensor) -> _OffloadedTensor:
        kept = _OffloadedTensor(tensor, self._last() if self._last is not None else None)
        self._last = weakref.ref(kept)
        if tensor.is_cuda:
            compute, side = torch.cuda.current_stream(tensor.device), self._side(tensor.device)
            kept.pinned, flat = PinnedCopy(tensor), tensor.flatten()
            side.wait_stream(compute)
            with torch.cuda.stream(side):
                kept.pinned.store(flat)
            self._release(1)
            self._leaving.append((flat, side.record_event()))
        elif tensor.is_meta:
            self.host_bytes += sum(pinned_blocks(tensor.nbytes))
            self._release(1)
            self._leaving.append((tensor, None))
        else:
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

    def _fetch(self, kept: _OffloadedTensor) -> None:
        """Start the transfer of a tensor back to the device, once."""
        if kept.back is not None:
            return
        if kept.host is not None:
            kept.back = kept.host
            return
        # Allocated on the compute stream, where it is used and freed.
        kept.back = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        if kept.pinned is not None:
            side = self._side(kept.device)
            side.wait_stream(torch.cuda.current_stream(kept.device))
            with torch.cuda.stream(side):
                kept.pinned.fetch(kept.back.flatten())
            kept.arrived = side.record_event()

    def _release(self, keep: int) -> None:
        """Free the device memory of offloaded tensors, except the latest `keep`."""
        while len(self._leaving) > keep:
            tensor, left = self._leaving.popleft()
            if left is not None:
                torch.cuda.current_stream(tensor.device).wait_event(left)

    def _side(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]
