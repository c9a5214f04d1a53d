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
    """How the lines of a method look.

    Attributes:
        light: colour on white.
        dark: colour on a dark page.
        marker: marker, by matplotlib's name.
    """

    light: str
    dark: str
    marker: str

    def shaded(self, step: int) -> Look:
        """The same hue, further from the background with each step, for further rows of one method."""
        part = min(step, 3) / 5
        markers = (MARKERS.index(self.marker) + step) % len(MARKERS)
        return Look(mix(self.light, "#000000", part), mix(self.dark, "#FFFFFF", part), MARKERS[markers])


def look(method: str) -> Look:
    """The look of a method, or of a composition by its outer method, such as `resonance(yarn)`.

    A method that is not in `HUE_OF` gets a look that follows from its name.
    """
    name = method.partition("(")[0].strip()
    if name == "none":
        return Look(*PLAIN, MARKERS[0])
    return _LOOKS.get(name) or _ALL[crc32(name.encode()) % len(_ALL)]


def _assigned() -> dict[str, Look]:
    """A look for each method of `HUE_OF`; methods of one hue have different markers."""
    seen: Counter[int] = Counter()
    looks = {}
    for name, hue in HUE_OF.items():
        looks[name] = Look(*HUES[hue], MARKERS[(hue + seen[hue]) % len(MARKERS)])
        seen[hue] += 1
    return looks


_LOOKS = _assigned()
_ALL = tuple(Look(*hue, marker) for marker in MARKERS for hue in HUES)


def channels(colour: str) -> tuple[float, float, float]:
    """Red, green and blue of `#RRGGBB`, from 0 to 1."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def mix(colour: str, other: str, part: float) -> str:
    """A colour with a part of another, from 0 to 1."""
    pairs = zip(channels(colour), channels(other), strict=True)
    return "#" + "".join(f"{round(255 * ((1 - part) * a + part * b)):02X}" for a, b in pairs)


def contrast(colour: str, background: str) -> float:
    """The contrast ratio of two colours, from 1 to 21, by the formula of WCAG 2."""
    light, dark = sorted((_luminance(colour), _luminance(background)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


_CIVIDIS = ("#00204C", "#414D6B", "#7C7B78", "#BAAE6C", "#FFE945")


def heat(share: float) -> tuple[str, str]:
    """The colour of a share from 0 to 1 in a heat map (matplotlib's cividis), and of the text on it."""
    at = max(0.0, min(1.0, share)) * (len(_CIVIDIS) - 1)
    low = min(int(at), len(_CIVIDIS) - 2)
    colour = mix(_CIVIDIS[low], _CIVIDIS[low + 1], at - low)
    return colour, max(("#FFFFFF", "#000000"), key=lambda text: contrast(text, colour))
