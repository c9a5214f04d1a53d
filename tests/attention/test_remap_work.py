"""The work of texts and of tokens after a cache, by counted pairs."""

from __future__ import annotations

import pytest
import torch
from test_remaps import Recorder

import rope_extend as rx
from rope_extend.attention import remap_parts
from rope_extend.encodings import RemapEncoding, RopeShape
from rope_extend.encodings.core.regions import Bands, Borders, Chunks, StartAndWindow

SHAPE = RopeShape(8, 10_000.0, 8192)
METHODS = {
    "dual_chunk": {"chunk": 5120, "local": 1024},
    "string": {"shift": 2731, "local": 512},
    "self_extend": {"group": 8, "window": 2048},
    "jet_long": {"near": 2047, "window": 8192},
    "rerope": {"window": 2048},
    "sinks": {"sinks": 4, "window": 8188},
}


def taken(borders: Borders, first: int, total: int) -> int:
    """The pairs that the calls compute, for tokens from `first` on. For many, nothing is computed."""
    states = torch.zeros(1, 1, total, 8, device="meta" if total > 100 else "cpu")
    text = remap_parts.Text(
        states[:, :, first:],
        states,
        states,
        lambda of, part, *_: part,
        [(first, total, total)],
        0,
        1.0,
    )
    with torch.no_grad(), Recorder() as recorder:
        assert remap_parts.attend(text, borders).shape[2] == total - first
    return recorder.pairs


def needed(borders: Borders, first: int, total: int) -> int:
    """The pairs that attend."""
    if not isinstance(borders, StartAndWindow):
        return sum(range(first + 1, total + 1))
    start, window = borders.start, borders.window
    return sum(min(i + 1, start) + min(max(0, i + 1 - start), window) for i in range(first, total))


def borders_of(name: str) -> Borders:
    encoding = rx.encoding(name, **METHODS[name])
    assert isinstance(encoding, RemapEncoding)
    return encoding.borders


@pytest.mark.parametrize("name", METHODS)
def test_a_few_tokens_after_a_cache_take_no_pair_more_than_attend(name: str) -> None:
    """Assisted decoding, prompt lookup and turns of a chat, at any place in a block or chunk."""
    borders = borders_of(name)
    for cached in (8187, 8300, 10239, 10240, 13000):
        for new in (2, 5, 64, 512):
            assert taken(borders, cached, cached + new) == needed(borders, cached, cached + new)


@pytest.mark.parametrize("borders", [Bands(4), Chunks(4), StartAndWindow(3, 4)], ids=str)
def test_no_text_takes_a_pair_more_than_attends(borders: Borders) -> None:
    for total in (3, 8, 9, 15, 21):
        for first in range(total):
            if remap_parts.can_be_cut(borders, 0, first):
                assert taken(borders, first, total) == needed(borders, first, total)
