"""Methods that change positions: equal to their published maps, in any batch, under any cache."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from batches import LENGTH, logits, same, tokens
from cases import REMAPS, TARGET, TRAINED, EncodingCase, FamilyCase, llama, stock, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_attention import INSIDE, PLAIN, naive_llama
from tolerances import assert_same_but_rounding, rounding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import rope_extend as rx
from rope_extend.attention import forward, remap_parts, rotation
from rope_extend.encodings import RemapEncoding, RopeShape
from rope_extend.encodings.core.regions import Bands, Borders, Chunks, StartAndWindow
from rope_extend.errors import UnsupportedModelError
from rope_extend.models.rotary_tables import shape_of


@cache
def yarn_of(length: int) -> tuple[list[float], float]:
    """Stock YaRN's table for a text, in steps of a quarter, and its factor on the logits."""
    end = TRAINED
    while end < length:
        end = max(end + 1, int(end * 1.25))
    if end == TRAINED:
        return PLAIN, 1.0
    table, factor = stock("yarn", factor=end / TRAINED)(RopeShape(16, 10_000.0, TRAINED), end)
    return table, factor**2


def table_of(case: EncodingCase, query: int, position: int) -> tuple[list[float], float]:
    """The frequencies of a pair, and the factor on the logits of its query that comes with them."""
    if case.name == "near_far" and query >= 6:
        table, factor = yarn_of(query + 1)
        return (table if query - position >= 6 else PLAIN), factor
    return PLAIN, 1.0


def distances(method: rx.Encoding, shape: RopeShape, length: int) -> list[list[float]]:
    """The distance that each query and key of a text are given; NaN if they do not attend.

    `test_peer_maps.py` compares it with the authors' programs.
    """
    assert isinstance(method, RemapEncoding)
    at = torch.arange(length)
    found: list[list[float]] = method.distance(shape, at[:, None], at).tolist()
    return found


def patched(model: PreTrainedModel, case: EncodingCase) -> rx.Patch:
    return rx.patch_model(model, case.build(shape_of(model)), target_length=TARGET)


@cache
def written_out(method: str, length: int = 40) -> Tensor:
    """Logits of Llama in float64, one query at a time, with the map of a method."""
    case = next(each for each in REMAPS if str(each) == method)
    given = distances(case.build(SHAPE), SHAPE, length)

    def rotation(query: int, position: int) -> tuple[list[float], float]:
        sharpened = case.name == "rerope" and not str(case).endswith("leak")
        scale = max(1.0, math.log(query + 1, TRAINED)) if sharpened else 1.0
        table, factor = table_of(case, query, position)
        angles = [-given[query][position] * frequency for frequency in table]
        return angles, math.sqrt(scale * factor)  # on query and key

    seen = torch.tensor(given).isnan().logical_not().tril()
    return naive_llama(llama(head_dim=16), tokens(1, length)[0], rotation, allowed=seen)


SHAPE = RopeShape(16, 10_000.0, TRAINED)
each_method = pytest.mark.parametrize("case", REMAPS, ids=str)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@each_method
def test_logits_equal_the_map_written_out(case: EncodingCase, implementation: str) -> None:
    """In parts without a mask (sdpa), and by regions (eager)."""
    model = llama(head_dim=16, attn_implementation=implementation)
    with patched(model, case):
        found = logits(model, tokens(1, 40))[0].double()
    assert_same_but_rounding(found, written_out(str(case)))


def test_a_model_that_was_cast_has_exact_frequencies_in_every_text() -> None:
    """Its own are rounded. Token by token, the first few tokens are a text without changed pairs."""
    models = [llama(head_dim=16) for _ in "ab"]
    frequencies = models[0].model.rotary_emb.inv_freq
    models[0].model.rotary_emb.inv_freq = frequencies.bfloat16()  # as after model.to(torch.bfloat16)
    for model in models:
        patched(model, REMAPS[0])
    for start in (0, 1000):
        positions = torch.arange(start, start + 6)[None]
        same(*(logits(model, tokens(1, 6), position_ids=positions) for model in models))


@pytest.mark.parametrize("log_n", [True, False])
def test_texts_without_distant_pairs_are_sharpened_too(log_n: bool) -> None:
    """Late positions are scaled by their logarithm, also if all pairs are near: written out."""
    model, start, length = llama(head_dim=16), 1000, 6
    case = EncodingCase("rerope", REMAPS[1].oracle, {"window": 8, "log_n": log_n}, reloads=False)

    def rotation(query: int, position: int) -> tuple[list[float], float]:
        scale = math.log(start + query + 1, TRAINED) if log_n else 1.0
        return [(position - query) * frequency for frequency in PLAIN], math.sqrt(scale)

    expected = naive_llama(model, tokens(1, length)[0], rotation)
    positions = torch.arange(start, start + length)[None]
    with patched(model, case):
        found = logits(model, tokens(1, length), position_ids=positions)[0].double()
    assert_same_but_rounding(found, expected)


class Recorder(TorchDispatchMode):
    """The sizes of all results, and of each attention by a kernel: rows, queries, keys, causal or not."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.calls: list[tuple[int, int, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.itemsize)
        if str(func).startswith("aten._scaled_dot_product_flash_attention_for_cpu.default"):
            query, key = args[:2]
            self.calls.append((len(query), query.shape[2], key.shape[2], len(args) > 4 and bool(args[4])))
        return result

    @property
    def pairs(self) -> int:
        return sum(
            rows * (queries * (queries + 1) // 2 if causal else queries * keys)
            for rows, queries, keys, causal in self.calls
        )


LONG = 1200


@pytest.mark.parametrize("method", [*REMAPS, *INSIDE], ids=str)
def test_a_prefill_takes_memory_linear_in_the_length_and_no_more_work(method: EncodingCase | str) -> None:
    """A window that is longer than the text changes nothing."""
    window = {"head_dim": 16, "num_hidden_layers": 1, "sliding_window": LONG + 1}
    model = tiny_model(FamilyCase("mistral", window)) if method == "dynamic_yarn" else llama(**window)
    encoding = (
        rx.Encoding.from_dict(INSIDE[method]) if isinstance(method, str) else method.build(shape_of(model))
    )
    recorders = []
    for length in (LONG // 2, LONG):
        recorders.append(Recorder())
        patch = rx.patch_model(model, encoding, target_length=TARGET)
        with patch, torch.no_grad(), recorders[-1]:
            model(tokens(1, length), use_cache=False)
    half, whole = recorders[0].largest, recorders[1].largest
    assert whole <= 2 * half
    assert whole < LONG * LONG / 8
    assert recorders[1].pairs <= LONG * (LONG + 1) // 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_kept_tables_are_bounded(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that follow the length have tables of their own for each segment, and all of the text's keys."""
    model = llama(head_dim=16, attn_implementation=implementation)
    case = next(each for each in REMAPS if each.name == "jet_long")
    sizes: list[int] = []
    attended = rotation.RotationHandler.attended

    def measured(handler: Any, module: Any) -> None:
        kept = [
            value[1] for name, value in handler._latest[1]._kept.items() if name[0] == "turn" and value[1]
        ]
        sizes.append(sum(part.numel() * part.element_size() for each in kept for part in each))
        attended(handler, module)

    monkeypatch.setattr(rotation.RotationHandler, "attended", measured)
    length, limit = 160, 2**15
    with patched(model, case):
        expected = logits(model, tokens(1, length))
        whole = max(sizes)
        sizes.clear()
        monkeypatch.setattr(forward, "TABLE_BYTES", limit)
        assert torch.equal(logits(model, tokens(1, length)), expected)
    assert whole > 5 * 2 * 8 * 4 * length  # bytes of cos and sin of all tokens
    assert max(sizes) <= limit


@st.composite
def texts(draw: st.DrawFn) -> tuple[Any, ...]:
    """A method with any parameters, its map, and the sizes of a text."""
    kind = draw(st.sampled_from(["self_extend", "string", "sinks", "dual_chunk", "jet_long", "rerope"]))
    one, two = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    parameters: dict[str, Any] = {
        "self_extend": {"group": one, "window": two},
        "string": {"shift": one + two, "local": one},
        "sinks": {"sinks": one, "window": two},
        "dual_chunk": {"chunk": one, "local": two},
        "jet_long": {"near": one, "window": one + two},
        "rerope": {"window": one, "leak": float(two), "log_n": False},
    }[kind]
    total = draw(st.integers(1, 45))
    first = draw(st.integers(0, total - 1))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    return kind, parameters, total, first, heads, kv_heads, draw(st.integers(1, 3))


@given(texts(), st.sampled_from([0, 0, 7, 12]))
def test_parts_without_a_mask_equal_attention_pair_by_pair(case: tuple[Any, ...], lowest: int) -> None:
    """In float64, for any parameters, lengths, tokens in a cache, groups of heads and first positions."""
    kind, parameters, total, first, heads, kv_heads, rows = case
    encoding = rx.encoding(kind, **parameters)
    assert isinstance(encoding, RemapEncoding)
    if not remap_parts.can_be_cut(encoding.borders, lowest, first):
        return
    make = torch.Generator().manual_seed(total)
    sizes = ((heads, total), (kv_heads, total), (kv_heads, total))
    query, key, value = (torch.randn(rows, *size, 4, dtype=torch.float64, generator=make) for size in sizes)
    shape = RopeShape(4, 100.0, 64)
    frequencies = shape.inv_freq()

    def turn(states: Tensor, positions: Tensor) -> Tensor:
        a, b = states.chunk(2, dim=-1)
        angles = positions[:, None] * frequencies
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def turned(of: str, states: Tensor, start: int, region: int, length: int) -> Tensor:
        positions = lowest + start + torch.arange(states.shape[2]).double()
        return turn(states, getattr(encoding.regions(shape, length)[region], of)(positions))

    lengths = encoding.table_length(shape, lowest + torch.arange(first, total) + 1)
    cuts = [0, *((lengths.diff() != 0).nonzero().flatten() + 1).tolist(), total - first]
    segments = [(first + a, first + b, int(lengths[a])) for a, b in itertools.pairwise(cuts)]
    text = remap_parts.Text(query[:, :, first:], key, value, turned, segments, lowest, 0.5)
    found = remap_parts.attend(text, encoding.borders)

    expected, distance = torch.zeros_like(query), distances(encoding, shape, lowest + total)
    for i in range(first, total):
        seen = [j for j in range(i + 1) if not math.isnan(distance[lowest + i][lowest + j])]
        given_distances = torch.tensor([-distance[lowest + i][lowest + j] for j in seen], dtype=torch.float64)
        keys, values = (part[:, :, seen].repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
        scores = 0.5 * (query[:, :, i : i + 1] * turn(keys, given_distances)).sum(-1)
        expected[:, :, i] = (scores.softmax(-1)[..., None] * values).sum(2)
    bound = rounding(torch.float64, 4 * total, max(1.0, float(value.abs().max())))
    torch.testing.assert_close(found, expected[:, :, first:], rtol=0, atol=4 * bound)


def taken(borders: Borders, first: int, total: int) -> int:
    """The pairs that the calls compute, for tokens from `first` on."""
    states = torch.zeros(1, 1, total, 8)
    segments = [(first, total, total)]
    text = remap_parts.Text(states[:, :, first:], states, states, lambda of, part, *_: part, segments, 0, 1.0)
    with torch.no_grad(), Recorder() as recorder:
        assert remap_parts.attend(text, borders).shape[2] == total - first
    return recorder.pairs


def needed(borders: Borders, first: int, total: int) -> int:
    """The pairs that attend."""
    if not isinstance(borders, StartAndWindow):
        return sum(range(first + 1, total + 1))
    start, window = borders.start, borders.window
    return sum(min(i + 1, start) + min(max(0, i + 1 - start), window) for i in range(first, total))


@pytest.mark.parametrize("borders", [Bands(4), Chunks(4), StartAndWindow(3, 4)], ids=str)
def test_no_text_takes_a_pair_more_than_attends(borders: Borders) -> None:
    """Also a few tokens after a cache, at any place in a block or chunk."""
    for total in (3, 8, 9, 15, 21):
        for first in range(total):
            if remap_parts.can_be_cut(borders, 0, first):
                assert taken(borders, first, total) == needed(borders, first, total)


def test_a_model_whose_windows_are_all_short_needs_no_extension() -> None:
    case = REMAPS[0]
    sliding = tiny_model(FamilyCase("mistral", {"head_dim": 16, "sliding_window": 24}))
    before, config = logits(sliding, tokens(1, LENGTH)), sliding.config.to_dict()
    with pytest.raises(UnsupportedModelError, match="only sees the last 24 tokens; it needs no extension"):
        patched(sliding, case)
    assert torch.equal(logits(sliding, tokens(1, LENGTH)), before)
    assert sliding.config.to_dict() == config


def test_a_prefix_keeps_the_distance_of_later_tokens() -> None:
    """Written out for one method of the others: a later key is as near as it is."""
    case, prefix = REMAPS[0], torch.ones(40, 40, dtype=torch.bool).tril() | (torch.arange(40) < 20)
    given, model = distances(case.build(SHAPE), SHAPE, 40), llama(head_dim=16)

    def rotation(query: int, position: int) -> tuple[list[float], float]:
        return [-given[query][position] * frequency for frequency in PLAIN], 1.0

    expected = naive_llama(model, tokens(1, 40)[0], rotation, allowed=prefix)
    with patched(model, case):
        found = logits(model, tokens(1, 40), attention_mask=prefix[None, None])[0].double()
    assert_same_but_rounding(found, expected)


def test_other_methods_around_are_refused() -> None:
    model = llama()
    for outer in ("resonance", "logn", "short_original", "xpos"):
        with pytest.raises(rx.RopeExtendError, match=rf"{outer}: inner must be.*use self_extend alone"):
            rx.extend(model, TARGET, f"{outer}(self_extend)")
