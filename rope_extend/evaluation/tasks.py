"""Synthetic retrieval tasks, with answers that only the prompt tells.

Nothing is downloaded: the haystack is repeated filler, or the texts that are given.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from rope_extend.demo import MODEL_DIR, passkey_document
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.prompts import Draft, Task

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The filler of 2305.16300, used by the passkey test of 2306.15595 and by RULER (2404.06654)."""

TEMPLATES = ("published", "demo")
"""The forms of the passkey task: the literature's, and the one that the bundled model was pretrained on."""


def template_for(model: str) -> str:
    """The form of the passkey task that suits a checkpoint: its own for the bundled model."""
    bundled = Path(model).is_dir() and Path(model).resolve() == MODEL_DIR
    return "demo" if bundled else "published"


DEMO_START = "<|endoftext|>"
"""What every document began with when the bundled model was pretrained; without it, it reads worse."""

LONG_SENTENCE = 120
"""Where a sentence has more characters than twice this, a needle may stand inside it."""

_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|[。！？]|\n+")


@dataclass(frozen=True)
class Passkey(Task):
    """One number in repeated filler, asked for at the end; the first number of the answer counts.

    Attributes:
        new_tokens: as for every task.
        template: ``published``, or ``demo`` for the code-like form of the bundled model.
    """

    new_tokens: int = 10
    template: str = "published"

    name: ClassVar[str] = "passkey"
    paper: ClassVar[str] = "2305.16300, 2306.15595"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template not in TEMPLATES:
            raise RopeExtendError(
                f"passkey: template must be one of {', '.join(TEMPLATES)}, got {self.template!r}"
            )

    def draft(self, rng: random.Random, depth: float, tokens: int) -> Draft:
        """The prompt of 2306.15595's figure 3, or that of ``passkey_document``."""
        if self.template == "demo":
            # More lines than will be needed: a line has more than four tokens.
            document = passkey_document(rng, filler_lines=tokens // 4 + 16, depth=1.0)
            filler, _, question = document.prompt.partition("# Remember the pass key.\n")
            answer, _, question = question.partition("\n")
            needle = f"# Remember the pass key.\n{answer}\n"
            question, _, key = question.rpartition("\n")
            hidden = _with_needles(filler, [(depth, needle)], "\n")
            # The answer follows the lead at once, on the line after the question.
            return Draft(
                "", lambda size: DEMO_START + hidden(size), question, f"\n{key}", (document.answer,), needle
            )
        key = str(rng.randint(10_000, 99_999))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."
        return Draft(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I "
            "will quiz you about the important information there.",
            _with_needles(FILLER, [(depth, needle)], "\n"),
            "What is the pass key?",
            " The pass key is",
            (key,),
            needle,
        )

    def score(self, response: str, answers: Sequence[str]) -> float:
        """1 if the first number in the response is the key, else 0: ``12`` for ``123`` is no answer."""
        number = re.search(r"\d+", response)
        return float(number is not None and number[0] == answers[0])

    def finished(self, response: str, answers: Sequence[str]) -> bool:
        """Once the first number is complete."""
        return re.search(r"\d+\D", response) is not None


@dataclass(frozen=True)
class Needle(Task):
    """A magic number for a word, in the given texts or in repeated filler.

    RULER's form of the needle in a haystack, which can be scored without a judge: the answer must contain
    each of the asked word's numbers, of 7 digits.

    Attributes:
        new_tokens: as for every task.
        keys: words that have numbers; one of them is asked for.
        values: numbers of each word, all of them asked for.
        haystack: texts to hide the needles in; repeated filler, if there are none.
    """

    keys: int = 1
    values: int = 1
    haystack: tuple[str, ...] = field(default=(), repr=False)

    name: ClassVar[str] = "needle"
    paper: ClassVar[str] = "2404.06654"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys > len(_ADJECTIVES):
            raise RopeExtendError(f"{self.name}: keys must be at most {len(_ADJECTIVES)}, got {self.keys}")

    def draft(self, rng: random.Random, depth: float, tokens: int) -> Draft:
        """The asked word's first number at ``depth``, all others anywhere."""
        text = _haystack(self.haystack, rng)
        adjectives, nouns = rng.sample(_ADJECTIVES, self.keys), rng.sample(_NOUNS, self.keys)
        words = [f"{adjective}-{noun}" for adjective, noun in zip(adjectives, nouns, strict=True)]
        numbers = _absent(rng, text, self.keys * self.values, lambda: str(rng.randint(10**6, 10**7 - 1)))
        needles = [
            f"One of the special magic numbers for {words[i // self.values]} is: {number}."
            for i, number in enumerate(numbers)
        ]
        places = [depth, *(rng.random() for _ in needles[1:])]
        several = self.values > 1
        some, number, are = ("Some", "numbers", "are") if several else ("A", "number", "is")
        asked = f"{words[0]} mentioned in the provided text"
        return Draft(
            f"{some} special magic {number} {are} hidden within the following text. Make sure to memorize "
            f"it. I will quiz you about the {number} afterwards.",
            _with_needles(text, list(zip(places, needles, strict=True)), " "),
            f"What {are} {'all ' if several else ''}the special magic {number} for {asked}?",
            f" The special magic {number} for {asked} {are}",
            tuple(numbers[: self.values]),
            needles[0],
        )


@dataclass(frozen=True)
class MultiKey(Needle):
    """A needle among needles: several words have a number, and one of the words is asked for."""

    keys: int = 4

    name: ClassVar[str] = "multi_key"


@dataclass(frozen=True)
class MultiValue(Needle):
    """Several numbers for one word, all of them asked for; the depth is that of the first."""

    new_tokens: int = 96
    values: int = 4

    name: ClassVar[str] = "multi_value"


@dataclass(frozen=True)
class VariableTracking(Task):
    """A number, a variable that is set to it, one set to that one, and so on: which variables have it?

    RULER's task, zero-shot: without the worked example that RULER puts before it.

    Attributes:
        new_tokens: as for every task.
        hops: links of a chain; one variable more than that has the number.
        chains: chains in the text; one of them is asked for.
        haystack: texts to hide them in; repeated filler, if there are none.
    """

    new_tokens: int = 40
    hops: int = 4
    chains: int = 1
    haystack: tuple[str, ...] = field(default=(), repr=False)

    name: ClassVar[str] = "variable_tracking"
    paper: ClassVar[str] = "2404.06654"
    placed: ClassVar[bool] = False

    def draft(self, rng: random.Random, depth: float, tokens: int) -> Draft:
        """Chains at random places, the links of each in their order."""
        text, links = _haystack(self.haystack, rng), self.hops + 1
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        names = _absent(rng, text, links * self.chains, lambda: "".join(rng.choices(letters, k=5)))
        numbers = _absent(rng, text, self.chains, lambda: str(rng.randint(10_000, 99_999)))
        needles: list[tuple[float, str]] = []
        for i, number in enumerate(numbers):
            chain = names[i * links : (i + 1) * links]
            values = [number, *(f"VAR {name}" for name in chain)]
            lines = [f"VAR {name} = {value}" for name, value in zip(chain, values, strict=False)]
            needles += zip(sorted(rng.random() for _ in lines), lines, strict=True)
        return Draft(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n",
            _with_needles(text, needles, "\n"),
            f"Question: Find all variables that are assigned the value {numbers[0]} in the text above.",
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{links} variables are assigned the value {numbers[0]}, they are: ",
            tuple(names[:links]),
        )


@dataclass(frozen=True)
class CommonWords(Task):
    """A numbered list of words in which ten come often and all others seldom: which are the ten?

    RULER's task, zero-shot. As there, a common word comes 30 times and another 3 times in prompts of 4,096
    tokens or more, else 6 times and once; what grows with the length is the number of other words. Here
    the words are invented ones, there English.

    Attributes:
        new_tokens: as for every task.
        common: how many words come often.
    """

    new_tokens: int = 120
    common: int = 10

    name: ClassVar[str] = "common_words"
    paper: ClassVar[str] = "2404.06654"
    placed: ClassVar[bool] = False

    def draft(self, rng: random.Random, depth: float, tokens: int) -> Draft:
        """The list grows by one of its other words at a time."""
        often, seldom = (30, 3) if tokens >= 4096 else (6, 1)
        words, common = _invented(rng, self.common + tokens // 3), self.common
        seed = rng.random()

        def context(size: int) -> str:
            listed = words[:common] * often + words[common : common + size] * seldom
            random.Random(seed).shuffle(listed)
            return " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))

        return Draft(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize "
            "the ones that appear most often.",
            context,
            f"Question: What are the {common} most common words in the above list?",
            f" Answer: The top {common} words that appear most often in the list are:",
            tuple(words[:common]),
            words=True,
        )


@dataclass(frozen=True)
class FrequentWords(Task):
    """Made-up words whose frequencies follow Zipf's law: which three come most often?

    RULER's task, zero-shot. As there, the k-th of the words comes in proportion to 1/k², and the first is
    replaced by dots, which do not count.
    """

    new_tokens: int = 50

    name: ClassVar[str] = "frequent_words"
    paper: ClassVar[str] = "2404.06654"
    placed: ClassVar[bool] = False

    def draft(self, rng: random.Random, depth: float, tokens: int) -> Draft:
        """The text grows by a word at a time; its words keep their shares."""
        words = ["...", *_invented(rng, max(8, tokens // 50))]
        seed = rng.random()

        def context(size: int) -> str:
            # From 32 on, there are more of the third word that counts than of the next one.
            drawn = [word for k, word in enumerate(words, start=1) for _ in range((32 + size) // k**2)]
            random.Random(seed).shuffle(drawn)
            return " ".join(drawn)

        return Draft(
            "Read the following coded text and track the frequency of each coded word. Find the three most "
            "frequently appeared coded words.",
            context,
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
            "most frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words are:",
            tuple(words[1:4]),
            words=True,
        )


TASKS: dict[str, type[Task]] = {
    cls.name: cls
    for cls in (Passkey, Needle, MultiKey, MultiValue, VariableTracking, CommonWords, FrequentWords)
}
"""The tasks by name."""


def make_tasks(
    names: Sequence[str], *, haystack: Sequence[str] = (), template: str = "published"
) -> list[Task]:
    """The tasks of these names, each once, with the given texts as their haystack where they have one.

    Raises:
        RopeExtendError: no such task or template.
    """
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise RopeExtendError(
            f"no retrieval task {', '.join(unknown) or 'given'}; there are {', '.join(TASKS)}"
        )
    texts = tuple(text for text in haystack if text.strip())
    options: dict[str, Any] = {"haystack": texts, "template": template}
    return [
        cls(**{one.name: options[one.name] for one in fields(cls) if one.name in options})
        for cls in (TASKS[name] for name in dict.fromkeys(names))
    ]


def _with_needles(source: str, needles: Sequence[tuple[float, str]], separator: str) -> Callable[[int], str]:
    """Of a size in characters: the beginning of ``source``, repeated, with each needle at its depth."""

    def context(size: int) -> str:
        text = (source * (size // len(source) + 1))[:size]
        ends = [0, *(match.end() for match in _SENTENCE_END.finditer(text))]
        if ends[-1] != size:
            ends.append(size)
        # From the last one on, so that the places of those before it stay what they are.
        for depth, needle in sorted(needles, key=lambda one: one[0], reverse=True):
            at = _break_near(text, ends, round(depth * size))
            left = text[:at]
            if left and not left.endswith((separator, "\n")):
                left = left.rstrip(" ") + separator
            text = left + (needle if needle.endswith("\n") else needle + separator) + text[at:]
        return text

    return context


def _break_near(text: str, ends: Sequence[int], place: int) -> int:
    """The end of the sentence nearest to a place; of a word, or the place itself, where none is near."""
    after = min(bisect_left(ends, place), len(ends) - 1)
    at = min(ends[max(0, after - 1) : after + 1], key=lambda end: abs(end - place))
    if abs(at - place) <= LONG_SENTENCE:
        return at
    space = text.rfind(" ", max(0, place - LONG_SENTENCE), place)
    return space + 1 if space >= 0 else place


def _haystack(texts: Sequence[str], rng: random.Random) -> str:
    """One of the texts, from the beginning of one of its sentences; or the filler."""
    if not texts:
        return FILLER
    text = rng.choice(texts)
    starts = [0, *(match.end() for match in _SENTENCE_END.finditer(text))]
    start = rng.choice(starts)
    return f"{text[start:].rstrip()}\n{text[:start]}".rstrip() + "\n"


def _absent(rng: random.Random, text: str, count: int, draw: Callable[[], str]) -> list[str]:
    """Draw different strings, none of which stands in the text already."""
    found: dict[str, None] = {}
    while len(found) < count:
        drawn = draw()
        if drawn not in text:
            found[drawn] = None
    return list(found)


def _invented(rng: random.Random, count: int) -> list[str]:
    """Different words of six letters, none of them a word."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))] = None
    return list(found)


_ADJECTIVES = (  # noqa: SIM905
    "amber ancient bitter blue bright calm clever cold crisp curious dusty eager early faint fancy fierce "
    "gentle golden grand green happy hollow humble icy jolly keen kind late lively lucky mellow mighty "
    "misty noble odd pale plain proud quick quiet rapid rare royal rusty sharp shiny silent silver simple "
    "sleepy slow small smooth soft solid spicy steady stormy strange sunny sweet swift tall tidy tiny tired "
    "tough vast vivid warm wild wise witty young"
).split()
_NOUNS = (  # noqa: SIM905
    "acorn anchor apple arrow badge basket beacon bell bench bird boat bottle bridge brush bucket butter "
    "button cabin candle canyon carpet castle cellar chair cherry circle cloud copper corner cradle crystal "
    "desert dinner dragon engine falcon feather field flower forest garden glacier hammer harbor island "
    "jacket jungle kettle ladder lantern lemon letter marble meadow mirror mountain needle oyster pebble "
    "pencil pepper pillow planet pocket rabbit ribbon river saddle shadow spider statue sugar temple thunder "
    "ticket tunnel valley violin wagon window winter"
).split()
