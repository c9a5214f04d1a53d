"""Remembers what operations return on the meta device, where torch computes shapes slowly, in Python."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_MOST = 100_000
"""Calls that are remembered, of about 1 KB each; then all are forgotten."""

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_known: dict[Hashable, tuple[Any, list[_Layout]]] = {}


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation on meta tensors, or allocate what it returned for arguments of the same layouts.

    The layers of a model are alike, so most calls have been made before. Remembered are operations that
    return new tensors, not those that return views of their arguments or write to them. An operation in place
    returns its first argument, whose layout it keeps.
    """
    if _keeps_the_layout(function) and args[0].is_meta:
        return args[0]
    if not _returns_new_tensors(function):
        return function(*args, **kwargs)
    try:
        key = (function, torch.get_default_dtype(), _description(args), _description(kwargs))
        known = _known.get(key)
    except _NotRememberedError:
        return function(*args, **kwargs)
    if known is None:
        out = function(*args, **kwargs)
        if (layouts := _layouts(out, _storages((args, kwargs)))) is not None:
            if len(_known) >= _MOST:
                forget()
            _known[key] = type(out), layouts
        return out
    kind, layouts = known
    tensors = [
        torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts
    ]
    return tensors[0] if issubclass(kind, Tensor) else kind(tensors)


def remembered() -> int:
    """The number of calls that are remembered."""
    return len(_known)


def forget() -> None:
    """Forget all calls."""
    _known.clear()


class _NotRememberedError(Exception):
    """The layout of the results may depend on more than the layouts of the arguments."""


@cache
def _returns_new_tensors(function: Any) -> bool:
    schema = function._schema
    return bool(schema.returns) and not any(
        each.alias_info is not None for each in (*schema.arguments, *schema.returns)
    )


@cache
def _keeps_the_layout(function: Any) -> bool:
    """Whether an operation only writes values to its first argument, and returns that."""
    schema = function._schema
    aliases = [each.alias_info for each in (*schema.arguments, *schema.returns)]
    if len(schema.returns) != 1 or None in (aliases[0], aliases[-1]) or any(aliases[1:-1]):
        return False
    same = aliases[0].is_write and aliases[0].before_set == aliases[-1].before_set
    return same and torch.Tag.inplace_view not in function.tags


def _description(value: Any) -> Hashable:
    """What the layout of the results can depend on. 1, 1.0 and True are equal, but give other dtypes."""
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in _PLAIN:
            raise _NotRememberedError
        return value.shape, value.stride(), value.dtype, value.is_conj()
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_description, value))
    if isinstance(value, dict):
        return tuple((name, _description(each)) for name, each in value.items())
    if value is None or isinstance(value, _VALUES):
        return type(value), value
    raise _NotRememberedError


_PLAIN = (Tensor, torch.nn.Parameter)
_VALUES = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _storages(arguments: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tree_leaves(arguments) if isinstance(each, Tensor)}


def _layouts(out: Any, taken: set[int]) -> list[_Layout] | None:
    """The layouts of one or several new tensors; None if `out` is not, or not only, that.

    Some results have the storage of an argument, which is in `taken`, though their schema does not say so.
    """
    tensors = [out] if isinstance(out, Tensor) else out
    if not isinstance(tensors, list | tuple):
        return None
    layouts: list[_Layout] = []
    for tensor in tensors:
        if type(tensor) is not Tensor or not tensor.is_meta or tensor.layout != torch.strided:
            return None
        layout = tensor.shape, tensor.stride(), tensor.dtype
        again = torch.empty_strided(*layout[:2], dtype=layout[2], device="meta")
        storage = tensor.untyped_storage()
        if storage._cdata in taken or again.untyped_storage().nbytes() != storage.nbytes():
            return None
        layouts.append(layout)
    return layouts
