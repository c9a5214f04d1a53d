"""The colours of methods: each has one colour and one marker in every picture and page of the project.

The hues follow Okabe and Ito, and colour-blind readers can tell the first five apart. Each has a shade for
white and one for a dark page, with a contrast of at least 3:1. Colour is never the only distinction: lines
have names, dashes and markers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from zlib import crc32

PAPER, NIGHT = "#FFFFFF", "#14171C"
"""The backgrounds of a light and of a dark page."""
HUES = (
    ("#0072B2", "#56B4E9"),
    ("#D55E00", "#FF8A3D"),
    ("#009E73", "#2FCB9C"),
    ("#CC79A7", "#E59AC4"),
    ("#B07A00", "#E6A817"),
    ("#6F4BA8", "#B79BE6"),
    ("#00707A", "#4CC3CF"),
    ("#8A4B2D", "#D39B7C"),
)
"""Each hue on white and on a dark page."""
PLAIN = ("#5F5F5F", "#A9AFB8")
"""The colour of plain RoPE and of models that were not changed."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Markers, by matplotlib's names."""
HUE_OF = {
    "linear": 0, "ntk": 1, "yarn": 2, "dynamic_ntk": 3, "dynamic_yarn": 4, "longrope": 5, "llama3": 6,
    "abf": 7, "short_original": 6, "dynamic_linear": 7, "ntk_by_parts": 4, "ntk_mixed": 7, "nope": 3,
    "drope": 5, "p_rope": 0, "clipped": 1, "power": 3, "truncated": 4, "resonance": 5, "logn": 7, "xpos": 6,
    "self_extend": 0, "rerope": 1, "jet_long": 2, "dual_chunk": 3, "sinks": 4, "string": 5, "near_far": 6,
    "alibi": 0, "t5_bias": 1, "kerple": 2, "fire": 3, "sandwich": 4, "shaw": 5, "linear_attention": 6,
    "sinusoidal": 7, "learned": 2,
}  # fmt: skip
"""The hue of each method. Methods that are often compared have different ones."""


@dataclass(frozen=True)
class Look:
    """How the lines of a method look: a colour on white, and a marker by matplotlib's name."""

    colour: str
    marker: str

    def shaded(self, step: int) -> Look:
        """The same hue, darker with each step, for further rows of one method."""
        marker = (MARKERS.index(self.marker) + step) % len(MARKERS)
        return Look(mix(self.colour, "#000000", min(step, 3) / 5), MARKERS[marker])


def look(method: str) -> Look:
    """The look of a method, or of a composition by its outer method, such as `resonance(yarn)`.

    A method that is not in `HUE_OF` gets a look that follows from its name.
    """
    name = method.partition("(")[0].strip()
    if name == "none":
        return Look(PLAIN[0], MARKERS[0])
    return _LOOKS.get(name) or _ALL[crc32(name.encode()) % len(_ALL)]


def _assigned() -> dict[str, Look]:
    """A look for each method of `HUE_OF`; methods of one hue have different markers."""
    seen: Counter[int] = Counter()
    looks = {}
    for name, hue in HUE_OF.items():
        looks[name] = Look(HUES[hue][0], MARKERS[(hue + seen[hue]) % len(MARKERS)])
        seen[hue] += 1
    return looks


_LOOKS = _assigned()
_ALL = tuple(Look(hue, marker) for marker in MARKERS for hue, _ in HUES)


def channels(colour: str) -> tuple[float, float, float]:
    """Red, green and blue of `#RRGGBB`, from 0 to 1."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def mix(colour: str, other: str, part: float) -> str:
    """A colour with a part of another, from 0 to 1."""
    pairs = zip(channels(colour), channels(other), strict=True)
    return "#" + "".join(f"{round(255 * ((1 - part) * a + part * b)):02X}" for a, b in pairs)
