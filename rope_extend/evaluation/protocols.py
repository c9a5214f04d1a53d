"""Perplexity protocols by name: which windows are processed, which tokens are scored, which mean is taken.

Published perplexities can be compared only if they used the same protocol. Each protocol here gives the
number of the script it is named after, on the same model and tokens. To add one, write a function that lays
out the windows of a text, and add an entry to `PROTOCOLS`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, SupportsIndex, TypedDict

from rope_extend.errors import RopeExtendError
from rope_extend.units import parse_length, parse_lengths

WEAK_CONTROL = "cropped-half"
"""The control of earlier versions."""
CONTROL_BLOCKS = 16
"""Blocks of targets that a control scores beyond its window: all targets, up to twice the window."""


class WindowSettings(TypedDict, total=False):
    """Settings of a protocol, numbers of tokens such as 4096 or `"4k"`, or of blocks; few have any."""

    window: int | str | None
    blocks: int | None
    stride: int | str | None
    last: int | str | None


def window_lengths(lengths: str | SupportsIndex | Iterable[str | SupportsIndex]) -> list[int]:
    """Lengths of windows in tokens, ascending and each once."""
    sizes = parse_lengths(lengths)
    if not sizes or sizes[0] < 2:  # nothing predicts the first token of a window
        raise RopeExtendError(f"lengths must be one or more numbers of tokens, 2 or above; got {lengths!r}")
    return sizes


Settings = Mapping[str, int]
"""The settings of a protocol: `window`, `stride` and `last` in tokens, and the number of `blocks`."""


class Window(NamedTuple):
    """One window of a text: the model processes tokens `start … stop−1`; tokens `first … end−1` are scored.

    `start < first < end <= stop + 1`: the token at `stop` can be scored, because the token before it predicts
    it.
    """

    start: int
    stop: int
    first: int
    end: int

    @property
    def tokens(self) -> int:
        """Number of tokens that the model processes."""
        return self.stop - self.start

    @property
    def targets(self) -> int:
        """Number of tokens that are scored."""
        return self.end - self.first


Layout = Callable[[int, int, Settings], list[Window]]
"""Takes the tokens of a text, the length and the settings; returns the windows in the order of the text."""


@dataclass(frozen=True)
class Protocol:
    """One way to measure perplexity at a length N.

    Attributes:
        name: the name in `perplexity(protocol=...)` and `--protocol`.
        measures: what it measures, in one line.
        flaw: its weakness, in one line.
        source: where its numbers are published.
        layout: returns the windows of a text.
        settings: its settings and their defaults in tokens; None if the setting is required.
        average: over scored `"token"`s, or over `"window"`s, each with the mean loss of its tokens.
        nested: whether the windows for N are those for a longer length without the targets from N on. Then
            one pass gives all lengths, and positions count from the start of the document, not of the window.
            Beyond the window of `cropped`, the blocks are spread up to the longest length.
        bos: whether each window begins with the BOS token instead of its own first token, if the documents
            begin with it. For `"either"`, both are measured, and the one with the lower loss counts.
        extra_tokens: tokens beyond N that a document needs.
    """

    name: str
    measures: str
    flaw: str
    source: str
    layout: Layout
    settings: Mapping[str, int | None] = field(default_factory=dict)
    average: Literal["token", "window"] = "token"
    nested: bool = False
    bos: bool | Literal["either"] = False
    extra_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def check_settings(
        self, settings: WindowSettings | Mapping[str, int | str | None], lengths: Sequence[int]
    ) -> dict[str, int]:
        """All settings of the protocol in tokens: those of `settings`, and the defaults of the others.

        Args:
            settings: by name; None is the same as a missing entry.
            lengths: lengths at which perplexity will be measured, in tokens; empty if not known yet.
        """
        values: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        for name in values.keys() - self.settings.keys():
            others = [other.name for other in PROTOCOLS.values() if name in other.settings]
            raise RopeExtendError(
                f"protocol {self.name!r} takes no {name}; got {values[name]!r}; leave it out, or use one of "
                f"{', '.join(others)}"
            )
        tokens = {}
        for name, default in self.settings.items():
            value = values.get(name, default)
            if value is None:
                raise RopeExtendError(
                    f"protocol {self.name!r} needs a {name}, the number of tokens of context, such as 4k"
                )
            tokens[name] = parse_length(value)
            low = 2 if name == "window" else 1
            high = min(lengths, default=math.inf) if name in ("stride", "last") else math.inf
            if not low <= tokens[name] <= high:
                limit = f"at least {low}" if tokens[name] < low else f"at most {high}, the shortest length"
                raise RopeExtendError(f"protocol {self.name!r}: {name} must be {limit}; got {tokens[name]}")
        return tokens


def protocol_named(name: str) -> Protocol:
    """Look up a protocol by name; the error names the nearest one."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    near = difflib.get_close_matches(str(name), PROTOCOLS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RopeExtendError(f"no perplexity protocol {name!r}.{hint} Known: {', '.join(PROTOCOLS)}")


def protocol_help() -> str:
    """All protocols as text for `--help`: what each measures, and its weakness."""
    lines = []
    for rule in PROTOCOLS.values():
        settings = "".join(f", {name} {value or '(required)'}" for name, value in rule.settings.items())
        lines += [f"  {rule.name}{settings}", f"      {rule.measures}", f"      But: {rule.flaw}"]
        lines += [f"      Source: {rule.source}"]
    return "\n".join(lines)


def _strided(tokens: int, length: int, stride: int) -> list[Window]:
    """Windows `stride` apart up to the end of the text; each scores targets that no earlier one scored."""
    windows = [Window(0, min(length, tokens), 1, min(length, tokens))]
    while windows[-1].stop < tokens:
        start, scored = windows[-1].start + stride, windows[-1].stop
        stop = min(start + length, tokens)
        windows.append(Window(start, stop, max(scored, start + 1), stop))
    # Without overlap the last window may have one token, and so no target.
    return [window for window in windows if window.first < window.end]


def control_targets(window: int, length: int, blocks: int) -> list[tuple[int, int]]:
    """The targets of a control beyond its window, in blocks `first … end−1` that are spread evenly.

    A block has a sixteenth of the window. So all its targets are predicted from nearly the whole window, by
    one forward of `window` tokens.
    """
    size = max(1, window // 16)
    places = -(-(length - window) // size)
    count = min(blocks, places)
    firsts = [window + size * ((2 * n + 1) * places // (2 * count)) for n in range(count)]
    return [(first, min(first + size, length)) for first in firsts]


def _cropped(tokens: int, length: int, given: Settings) -> list[Window]:
    window, whole = given["window"], min(given["window"], length)
    beyond = control_targets(window, length, given["blocks"])
    windows = [Window(end - 1 - window, end - 1, first, end) for first, end in beyond]
    return [Window(0, whole, 1, whole), *windows]


def _disjoint(tokens: int, length: int, settings: Settings) -> list[Window]:
    ends = [*range(length + 1, tokens, length), tokens]
    # The last window overlaps the one before it, so that it is full.
    return [Window(end - 1 - length, end - 1, 1 + number * length, end) for number, end in enumerate(ends)]


def _second_half(tokens: int, length: int, settings: Settings) -> list[Window]:
    starts = range(0, tokens - length + 1, length)
    return [Window(start, start + length, start + length // 2 + 1, start + length) for start in starts]


PROTOCOLS: Mapping[str, Protocol] = {
    rule.name: rule
    for rule in (
        Protocol(
            "prefix",
            "All targets among the first N tokens of each document, in one forward: truncation to N.",
            "Targets early in the document have little context at any N, so the gain at N is an average.",
            "rope_extend",
            lambda tokens, length, _: [Window(0, length, 1, length)],
            nested=True,
        ),
        Protocol(
            "cropped",
            "Targets of prefix: all within `window`, and `blocks` of a sixteenth of it beyond; these see at "
            "least 15/16 of it.",
            "A control, not a result: how well a model without a longer context does on the same text.",
            "rope_extend",
            _cropped,
            {"window": None, "blocks": CONTROL_BLOCKS},
            nested=True,
            bos="either",  # some models need it, others take it for a new text: neither must weaken a control
        ),
        Protocol(
            WEAK_CONTROL,
            "The targets of prefix, but the model sees only `window` tokens at a time, half of them new.",
            "The control of earlier versions: targets see 3/4 of the window on average, which is too little.",
            "rope_extend",
            lambda tokens, length, given: _strided(length, given["window"], given["window"] // 2),
            {"window": None},
            nested=True,
            bos=True,
        ),
        Protocol(
            "sliding",
            "All targets of whole documents, in windows of N that each add `stride` targets with context.",
            "Costs N / stride passes over the text, and the first window's targets have less context.",
            "Press et al. 2012.15832; Position Interpolation 2306.15595 (stride 256)",
            lambda tokens, length, given: _strided(tokens, length, given["stride"]),
            {"stride": 256},
        ),
        Protocol(
            "sliding-window-mean",
            "The windows of sliding, but the mean of their mean losses.",
            "A window with few targets, such as the last, has the same weight as the first with its N − 1.",
            "YaRN 2309.00071, EasyContext (stride 256)",
            lambda tokens, length, given: _strided(tokens, length, given["stride"]),
            {"stride": 256},
            average="window",
            bos=True,
        ),
        Protocol(
            "last-k",
            "The same `last` targets of each document at every N, in one window of N tokens.",
            "Only the ends of documents are scored, and each length needs its own forward.",
            "ReRoPE (github.com/bojone/rerope, last 4096)",
            lambda tokens, length, given: [
                Window(tokens - 1 - length, tokens - 1, tokens - given["last"], tokens)
            ],
            {"last": 4096},
            extra_tokens=1,
        ),
        Protocol(
            "disjoint",
            "All targets of whole documents, in windows of N that follow each other.",
            "The context is N / 2 on average, and 1 token where a window starts: too little credit for N.",
            "lm-evaluation-harness (loglikelihood_rolling)",
            _disjoint,
            extra_tokens=1,
        ),
        Protocol(
            "disjoint-second-half",
            "The second half of each window of N; windows follow each other, an incomplete one is dropped.",
            "Half of the text is never scored, and which half depends on N, so lengths do not share targets.",
            "llama.cpp (llama-perplexity)",
            _second_half,
            bos=True,
        ),
    )
}
"""Every protocol by name."""
