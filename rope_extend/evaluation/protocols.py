"""Ways to measure perplexity, each under its name: what is read, what is scored, and what mean is taken.

Two published perplexities compare only where the protocol is the same. Each protocol here gives the number of
the script it is named after, on the same model and tokens. To add one: a function that plans the windows of
a text, and one entry in the table at the end.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from rope_extend.data import parse_length
from rope_extend.errors import RopeExtendError

Settings = Mapping[str, int]
"""A protocol's own settings, each a number of tokens: `window`, `stride` or `last`."""


class Window(NamedTuple):
    """One piece of a text: the model reads the tokens `start … stop−1`; scored are `first … end−1`.

    `start < first < end <= stop + 1`, because the token at `stop` can be predicted without being read.
    """

    start: int
    stop: int
    first: int
    end: int


Plan = Callable[[int, int, Settings], list[Window]]
"""`(tokens of the text, length, settings)` to the windows, in the order of the text."""


@dataclass(frozen=True)
class Protocol:
    """One way to measure perplexity at a length N.

    Attributes:
        name: what `perplexity(protocol=...)` and `--protocol` call it.
        measures: one line.
        flaw: what is wrong with it, one line.
        source: where the number is found.
        plan: which windows are read, and what is scored in each.
        settings: its settings and their defaults in tokens; None where one must be given.
        average: over scored ``"token"`` s, or over ``"window"`` s, each by the mean loss of its tokens.
        nested: whether the plan for N is the one for a longer length, without the targets from N on: then
            one pass gives all lengths, and positions are those in the document, not in the window.
        joined: whether all documents are read as one text.
        bos: whether each window begins with the token that begins sequences, in the place of its own first
            token, where the documents begin with it.
        beyond: how many tokens more than N a document needs.
        same_targets: whether every N scores the same targets, so that a shorter N is the control for a longer
            one: the same text, with no longer a context.
    """

    name: str
    measures: str
    flaw: str
    source: str
    plan: Plan
    settings: Mapping[str, int | None] = field(default_factory=dict)
    average: Literal["token", "window"] = "token"
    nested: bool = False
    joined: bool = False
    bos: bool = False
    beyond: int = 0
    same_targets: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def checked(self, lengths: Sequence[int], given: Mapping[str, int | str | None]) -> dict[str, int]:
        """Its settings in tokens, from those that were given and its defaults.

        Raises:
            RopeExtendError: a setting it does not take, one that is missing, or one that makes no sense.
        """
        for name, value in given.items():
            if value is not None and name not in self.settings:
                takers = ", ".join(repr(one.name) for one in PROTOCOLS.values() if name in one.settings)
                raise RopeExtendError(f"protocol {self.name!r} takes no {name}, got {value!r}; {takers} does")
        chosen = {}
        for name, default in self.settings.items():
            value = given.get(name)
            value = default if value is None else parse_length(value)
            if value is None:
                raise RopeExtendError(
                    f"protocol {self.name!r} needs a {name}, the number of tokens the model sees at a time"
                )
            if name == "window" and value < 2:
                raise RopeExtendError(
                    f"a window needs 2 tokens or more, one to read and one to predict; got {value}"
                )
            if name != "window" and value > min(lengths):
                raise RopeExtendError(
                    f"protocol {self.name!r}: {name}={value} exceeds the length {min(lengths)}; give a "
                    f"{name} of at most {min(lengths)}, or longer lengths"
                )
            chosen[name] = value
        return chosen


def protocol(name: str) -> Protocol:
    """The protocol of a name.

    Raises:
        RopeExtendError: there is none; says which is nearest.
    """
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    near = difflib.get_close_matches(str(name), PROTOCOLS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RopeExtendError(f"no perplexity protocol {name!r}; there are {', '.join(PROTOCOLS)}.{hint}")


def table() -> str:
    """All protocols in words, for `--help`: what each measures and what is wrong with it."""
    lines = []
    for one in PROTOCOLS.values():
        settings = "".join(f", {name} {value or 'to be given'}" for name, value in one.settings.items())
        lines += [f"  {one.name}{settings}", f"      {one.measures}", f"      But: {one.flaw}"]
        lines += [f"      Found in: {one.source}"]
    return "\n".join(lines)


def _strided(tokens: int, length: int, stride: int) -> list[Window]:
    """Windows `stride` apart up to the end; each scores what none before it has."""
    windows = [Window(0, min(length, tokens), 1, min(length, tokens))]
    while windows[-1].stop < tokens:
        start, scored = windows[-1].start + stride, windows[-1].stop
        stop = min(start + length, tokens)
        windows.append(Window(start, stop, max(scored, start + 1), stop))
    # Without overlap the last may hold one token, and so nothing to predict.
    return [window for window in windows if window.first < window.end]


def _prefix(tokens: int, length: int, settings: Settings) -> list[Window]:
    return [Window(0, length, 1, length)]


def _cropped(tokens: int, length: int, settings: Settings) -> list[Window]:
    return _strided(length, settings["window"], settings["window"] // 2)


def _sliding(tokens: int, length: int, settings: Settings) -> list[Window]:
    return _strided(tokens, length, settings["stride"])


def _all_overlapping(tokens: int, length: int, settings: Settings) -> list[Window]:
    starts = range(0, tokens - length, settings["stride"])[:-1]  # the last one is left out, as in LongLoRA
    return [Window(start, start + length, start + 1, start + length) for start in starts]


def _last(tokens: int, length: int, settings: Settings) -> list[Window]:
    return [Window(tokens - 1 - length, tokens - 1, tokens - settings["last"], tokens)]


def _disjoint(tokens: int, length: int, settings: Settings) -> list[Window]:
    ends = [*range(length + 1, tokens, length), tokens]
    # The last one reaches back to a full window.
    return [Window(end - 1 - length, end - 1, 1 + number * length, end) for number, end in enumerate(ends)]


def _second_half(tokens: int, length: int, settings: Settings) -> list[Window]:
    starts = range(0, tokens - length + 1, length)
    return [Window(start, start + length, start + length // 2 + 1, start + length) for start in starts]


PROTOCOLS: Mapping[str, Protocol] = {
    one.name: one
    for one in (
        Protocol(
            "prefix",
            "All targets among a document's first N tokens, in one forward: truncation to N, at every N.",
            "Targets early in the document have little context at any N, so the gain at N is an average.",
            "rope_extend",
            _prefix,
            nested=True,
        ),
        Protocol(
            "cropped",
            "The targets of prefix, but the model sees `window` tokens at a time, half of them new.",
            "A control, not a result: it says what the text is worth to a model without a longer context.",
            "rope_extend",
            _cropped,
            {"window": None},
            nested=True,
        ),
        Protocol(
            "sliding",
            "All targets of whole documents, in windows of N that each add `stride` targets with context.",
            "Costs N / stride passes over the text, and the first window's targets have less context.",
            "Press et al. 2012.15832; Position Interpolation 2306.15595 (stride 256)",
            _sliding,
            {"stride": 256},
            same_targets=True,
        ),
        Protocol(
            "sliding-window-mean",
            "The windows of sliding, but the mean of their mean losses.",
            "A window of few targets, such as the last, weighs as much as the first with its N − 1.",
            "YaRN 2309.00071, EasyContext (stride 256)",
            _sliding,
            {"stride": 256},
            average="window",
            bos=True,
        ),
        Protocol(
            "all-overlapping",
            "All targets of all windows of N over all documents joined, `stride` apart: means of windows.",
            "Targets count up to N / stride times, with contexts from 1 token on and across documents.",
            "LongLoRA 2309.12307 (stride 256)",
            _all_overlapping,
            {"stride": 256},
            average="window",
            joined=True,
        ),
        Protocol(
            "last-k",
            "The same `last` targets of each document at every N, with N tokens of context read in all.",
            "Only the ends of documents are scored, and each length needs its own forward.",
            "ReRoPE (github.com/bojone/rerope, last 4096)",
            _last,
            {"last": 4096},
            beyond=1,
            same_targets=True,
        ),
        Protocol(
            "disjoint",
            "All targets of whole documents, in windows of N that follow each other.",
            "The context is N / 2 on average and 1 at the seams: what N could do is watered down.",
            "lm-evaluation-harness (loglikelihood_rolling)",
            _disjoint,
            beyond=1,
            same_targets=True,
        ),
        Protocol(
            "disjoint-second-half",
            "The second half of each of the windows of N that follow each other; a rest is left out.",
            "Half the text is never scored, and which half depends on N: lengths do not share targets.",
            "llama.cpp (llama-perplexity)",
            _second_half,
            bos=True,
        ),
    )
}
"""Every protocol by name."""
