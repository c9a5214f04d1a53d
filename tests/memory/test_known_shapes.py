"""A remembered call on the meta device returns what the operation itself returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rope_extend.memory import known_shapes

aten = torch.ops.aten
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.add.Tensor, (torch.ones(3, dtype=torch.int64), 1)),
    (aten.add.Tensor, (torch.ones(3, dtype=torch.int64), 1.0)),  # equal to 1 and True, with another result
    (aten.mul.Tensor, (torch.ones(3, dtype=torch.bool), True)),
    (aten.mul.Tensor, (torch.ones(4, 1, 2), torch.ones(3, 1, dtype=torch.float64))),
    (aten.mm.default, (torch.ones(2, 3), torch.ones(3, 5))),
    (aten.mm.default, (torch.ones(3, 2).t(), torch.ones(3, 5))),
    (aten.clone.default, (torch.ones(2, 3, 4).transpose(0, 2),)),  # keeps the order of the dimensions
    (aten.cat.default, ([torch.ones(2, 3), torch.ones(2, 5)], 1)),
    (aten.cat.default, ([torch.ones(2, 3), torch.ones(4, 3)], 0)),
    (aten.topk.default, (torch.ones(2, 7), 3)),
    (aten.native_layer_norm.default, (torch.ones(2, 3, 8), [8], torch.ones(8), torch.ones(8), 1e-5)),
    (aten.sum.dim_IntList, (torch.ones(2, 3, 8), [1])),
    (aten.sum.dim_IntList, (torch.ones(2, 3, 8), [1], True)),
    (aten._to_copy.default, (torch.ones(2, 3),)),
]  # fmt: skip


def to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [to_meta(each) for each in value] if isinstance(value, list) else value


def layouts(out: Any) -> list[Any]:
    tensors = [out] if isinstance(out, Tensor) else out
    return [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in tensors]


def test_calls_return_the_layouts_that_a_cpu_returns() -> None:
    known_shapes.forget()
    for _ in range(2):
        for function, args in CALLS:
            out = known_shapes.call(function, tuple(map(to_meta, args)), {})
            assert layouts(out) == layouts(function(*args)), function
            assert all(each.is_meta for each in ([out] if isinstance(out, Tensor) else out))
    assert known_shapes.remembered() == len(CALLS)


@pytest.mark.parametrize("function", [aten.view.default, aten.add_.Tensor])
def test_views_and_writes_return_the_memory_of_their_argument(function: Any) -> None:
    known_shapes.forget()
    for _ in range(2):
        value = torch.ones(2, 3, device="meta")
        out = known_shapes.call(function, (value, [3, 2] if function is aten.view.default else 1), {})
        assert out.untyped_storage()._cdata == value.untyped_storage()._cdata
    assert known_shapes.remembered() == 0


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.add_.Tensor, (torch.ones(2, 3), torch.ones(3))),
        (aten.lerp_.Scalar, (torch.ones(2, 3).t(), torch.ones(3, 2), 0.5)),
        (aten.copy_.default, (torch.ones(2, 3, dtype=torch.int64), torch.ones(3))),
        (aten.masked_fill_.Scalar, (torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool), 0.0)),
        (aten.mul.out, (torch.ones(3), 2, torch.ones(3))),
        (aten.transpose_.default, (torch.ones(2, 3), 0, 1)),
        (aten.unsqueeze_.default, (torch.ones(2, 3), 0)),
        (aten.resize_.default, (torch.ones(2, 3), [5, 7])),
        (aten.set_.source_Tensor, (torch.ones(2, 3), torch.ones(4, 5))),
    ],
    ids=str,
)  # fmt: skip
def test_writes_in_place_leave_the_layout_that_a_cpu_leaves(function: Any, args: tuple[Any, ...]) -> None:
    """Also if the operation changes the layout of its argument."""
    known_shapes.forget()

    def run(values: tuple[Any, ...], call: Any) -> list[Any]:
        written = values[-1 if function is aten.mul.out else 0]
        if function is aten.mul.out:
            return layouts([call(function, values[:-1], {"out": written}), written])
        return layouts([call(function, values, {}), written])

    copies = tuple(each.clone() if isinstance(each, Tensor) else each for each in args)
    real = run(copies, lambda function, args, kwargs: function(*args, **kwargs))
    assert run(tuple(map(to_meta, args)), known_shapes.call) == real


def test_results_that_share_memory_though_their_schema_does_not_say_so_are_not_remembered() -> None:
    known_shapes.forget()
    for _ in range(2):
        value = torch.ones(2, 3, device="meta")
        for out in (
            known_shapes.call(aten._unsafe_view.default, (value, [3, 2]), {}),
            known_shapes.call(aten.unsafe_split.Tensor, (value, 2), {})[0],
        ):
            assert out.untyped_storage()._cdata == value.untyped_storage()._cdata
    assert known_shapes.remembered() == 0


def test_the_default_dtype_counts() -> None:
    whole = torch.ones(3, dtype=torch.int64, device="meta")
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert known_shapes.call(aten.div.Tensor, (whole, 2), {}).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_tensors_with_values_are_computed() -> None:
    known_shapes.forget()
    for number in (1, 2):
        assert (
            known_shapes.call(aten.mul.Tensor, (torch.full((2,), number), 3), {}).tolist() == [3 * number] * 2
        )
        value = torch.full((2,), number)
        assert known_shapes.call(aten.add_.Tensor, (value, 3), {}) is value
        assert value.tolist() == [number + 3] * 2
    assert known_shapes.remembered() == 0


def test_errors_are_those_of_the_operation() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            known_shapes.call(aten.mm.default, (torch.ones(2, 3, device="meta"),) * 2, {})
