"""Counts the bytes that a computation holds, exactly and on any device, the meta device included."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations return while it is active, until they are freed.

    Not counted: tensors from before, and memory that a kernel allocates and frees internally. Also implements
    operations that the meta device lacks.

    Attributes:
        live: bytes at present.
        peak: maximum of `live`.
        largest: number of elements of the largest tensor.
        operations: number of operations.
        scored: number of tokens that are scored, as the result of `nonzero` on the meta device; further
            tokens need no more memory. If not given, `nonzero` is not implemented.
    """

    def __init__(self, scored: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.largest = self.operations = 0
        self.scored = scored
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, and look for it at each operation."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._call(function, args, kwargs or {})
        self.operations += 1
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation, or allocate what it returns where the meta device lacks it."""
        if function is aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # the answer to whether all tokens belong to one text
        if self.scored and function is aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((min(args[0].numel(), self.scored), args[0].ndim), dtype=torch.int64)
        if function is aten._grouped_mm.default and args[0].is_meta:
            rows, columns = args[0].shape[-2], args[1].shape[-1]
            groups = args[2].shape if args[1].ndim == 2 else ()  # the gradient of the weights
            return args[0].new_empty(*groups, rows, columns)
        return function(*args, **kwargs)

    def add(self, tensor: torch.Tensor) -> Self:
        """Count a tensor that exists already."""
        self.largest = max(self.largest, tensor.numel())
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, key)
        return self

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
