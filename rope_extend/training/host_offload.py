"""The inputs of checkpointed layers in host memory, by torch's own `save_on_cpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks


class HostOffload:
    """Moves the inputs of checkpointed layers to pinned host memory, and back for the backward pass.

    On a CPU, where all memory is host memory, they stay where they are.

    Attributes:
        host_bytes: bytes of pinned memory that the inputs of a dry run on the meta device would take. Torch
            rounds each pinned tensor up to a power of two.
    """

    def __init__(self) -> None:
        self.host_bytes = 0

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
        storage, hooks = states.untyped_storage()._cdata, save_on_cpu(pin_memory=states.is_cuda)

        def pack(tensor: Tensor) -> Any:
            # Only the hidden states: all layers share rotary tables and masks, which stay on the device.
            if tensor.untyped_storage()._cdata != storage:
                return tensor
            if tensor.is_meta:
                self.host_bytes += 1 << (tensor.nbytes - 1).bit_length()
                return tensor.shape, tensor.dtype
            return hooks.pack_hook(tensor)

        def unpack(kept: Any) -> Any:
            if isinstance(kept, Tensor):
                return kept
            if isinstance(kept[0], torch.Size):
                return torch.empty(kept[0], dtype=kept[1], device="meta")
            return hooks.unpack_hook(kept)

        # Checkpointing saves the inputs of a layer under these hooks, and uses its own inside the layer.
        with saved_tensors_hooks(pack, unpack):
            return run(function, *args, **kwargs)
