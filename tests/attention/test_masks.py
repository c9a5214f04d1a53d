"""Which masks show a key to an earlier query."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_extend.attention import masks


@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 2), st.data())
def test_one_later_key_is_enough(queries: int, first: int, beyond: int, data: st.DataObject) -> None:
    """A causal mask with one pair more, for queries that follow `first` keys, in blocks of any size."""
    keys = first + queries + beyond
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(first)
    rows = data.draw(st.integers(1, queries + 1), label="rows of a block")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "MASK_ROWS", rows)
        assert not masks._shows_later(mask, queries, first)
        later = [(i, j) for i in range(queries) for j in range(first + i + 1, keys)]
        for query, key in later:
            more = mask.clone()
            more[query, key] = True
            assert masks._shows_later(more, queries, first)
