"""Synthetic retrieval tasks, whose answers are only in the prompt.

Nothing is downloaded: the haystack is repeated filler, or the user's texts.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.prompts import Draft, Starts, Task

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The filler of 2305.16300, used by the passkey test of 2306.15595 and by RULER (2404.06654)."""


def template_for(tokenizer: Any) -> str:
    """The form of the passkey task: `demo`, of its pretraining, for the bundled model, else `published`.

    The model is known by its tokens: copies and merged weights of it are asked in the same form.
    """
    tokens = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return "demo" if tokens.items() <= tokenizer.get_vocab().items() else "published"


DEMO_START = "<|endoftext|>"
"""The first token of every document in the bundled model's pretraining; without it, it does worse."""

LONG_SENTENCE = 120
"""Maximum distance in characters from a needle's depth to the sentence end where it is put instead."""

_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|[。！？]|\n+")


@dataclass(frozen=True)
class Passkey(Task):
    """One number in repeated filler, and a question for it at the end: 2305.16300 and 2306.15595.

    The first number in the response counts.

    Attributes:
        template: `published`, or `demo` for the code-like form of the bundled model.
    """

    new_tokens: int = 10
    template: str = "published"

    name: ClassVar[str] = "passkey"

    def draft(self, rng: random.Random, depth: float, tokens: int, starts: Starts) -> Draft:
        """The prompt of figure 3 in 2306.15595, or a page of code-like lines."""
        if self.template == "demo":
            key = "".join(str(rng.randint(int(digit == 0), 9)) for digit in range(5))
            # More lines than needed: a line has more than four tokens.
            filler = "".join(f"{_code_line(rng)}\n" for _ in range(tokens // 4 + 16))
            needle = f"# Remember the pass key.\nPASS_KEY = {key}\n"
            hidden = _with_needles(filler, [(depth, needle)], "\n", starts)
            # The answer directly follows the lead, on the line after the question.
            question, lead = "# What is the pass key?", "\nPASS_KEY = "
            return Draft("", lambda size: DEMO_START + hidden(size), question, lead, (key,))
        key = str(rng.randint(10_000, 99_999))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."
        return Draft(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I "
            "will quiz you about the important information there.",
            _with_needles(_haystack((), rng), [(depth, needle)], "\n", starts),
            "What is the pass key?",
            " The pass key is",
            (key,),
        )

    def score(self, response: str, answers: Sequence[str]) -> float:
        """1 if the first number in the response is the key, else 0; a part of it scores 0."""
        number = re.search(r"\d+", response)
        return float(number is not None and number[0] == answers[0])

    def finished(self, response: str, answers: Sequence[str]) -> bool:
        """Whether the first number is complete."""
        return re.search(r"\d\D", response) is not None


@dataclass(frozen=True)
class Needle(Task):
    """A magic number of 7 digits for a word, hidden in texts or in repeated filler.

    This is the form of RULER (2404.06654), which needs no judge: the answer must contain the number.

    Attributes:
        keys: number of words with numbers; the question is for one of the words.
        haystack: texts to hide the needles in; repeated filler if empty.
    """

    keys: int = 1
    haystack: tuple[str, ...] = field(default=(), repr=False)

    name: ClassVar[str] = "needle"

    def draft(self, rng: random.Random, depth: float, tokens: int, starts: Starts) -> Draft:
        """The number of the word in question at `depth`, all other numbers at random depths."""
        text = _haystack(self.haystack, rng)
        adjectives, nouns = rng.sample(_ADJECTIVES, self.keys), rng.sample(_NOUNS, self.keys)
        words = [f"{adjective}-{noun}" for adjective, noun in zip(adjectives, nouns, strict=True)]
        numbers = _absent(rng, text, self.keys, lambda: str(rng.randint(10**6, 10**7 - 1)))
        needles = [
            f"One of the special magic numbers for {word} is: {number}."
            for word, number in zip(words, numbers, strict=True)
        ]
        depths = [depth, *(rng.random() for _ in needles[1:])]
        topic = f"{words[0]} mentioned in the provided text"
        return Draft(
            "A special magic number is hidden within the following text. "
            "Make sure to memorize it. I will quiz you about the number afterwards.",
            _with_needles(text, list(zip(depths, needles, strict=True)), " ", starts),
            f"What is the special magic number for {topic}?",
            f" The special magic number for {topic} is",
            (numbers[0],),
        )


@dataclass(frozen=True)
class MultiKey(Needle):
    """Several words with a number each; the question is for one of the words."""

    keys: int = 4

    name: ClassVar[str] = "multi_key"


@dataclass(frozen=True)
class ManyShot(Task):
    """Examples that fill the prompt: an invented word and its label, which is to be found in the examples.

    This is many-shot learning (2404.11018): the longer the prompt, the more examples there are of a word.
    The first examples show each word once, those after them draw words at random. The last lines are the
    questions, each for another word, so that one forward answers all of them.

    Attributes:
        words: number of words; each has one of 81 labels.
        questions: number of lines whose labels are the answers. Their words have examples: a prompt that is
            too short for them is refused.
    """

    new_tokens: int = 0
    words: int = 250
    questions: int = 16

    name: ClassVar[str] = "many_shot"
    has_depth: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    def draft(self, rng: random.Random, depth: float, tokens: int, starts: Starts) -> Draft:
        """Examples in lines, and the lines that are questions."""
        labels: dict[str, str] = {}
        while len(labels) < self.words:
            labels[_invented(rng)] = rng.choice(_NOUNS)
        words = [*labels]
        shown = words[: max(self.questions, tokens // 16 - self.questions)]
        asked = rng.sample(shown, self.questions)
        words += rng.choices(words, k=tokens // 3 + 16)
        examples, questions = (
            "".join(f"{word}: {labels[word]}\n" for word in each) for each in (words, asked)
        )
        return Draft(
            "Each line has an invented word and its label.\n",
            lambda size: examples[: examples.rfind("\n", 0, size) + 1],
            "",
            f"\n{questions}"[:-1],
            tuple(labels[word] for word in asked),
            sum(len(f"{word}: {labels[word]}\n") for word in shown),
        )


@dataclass(frozen=True)
class Definition(Task):
    """Which file of a package defines a name that is used nowhere else in it? The package is the prompt.

    The code is real, and the paths of its files are replaced by invented ones, so that no model knows the
    answer from its training. The name is defined once, near the beginning of its file, and stands nowhere
    else in the package, so that no import tells the file either.

    Attributes:
        haystack: source code, one package a text, with a line `# path.py` above each file, as
            `tools/code_corpus.py` writes them.
    """

    new_tokens: int = 16
    haystack: tuple[str, ...] = field(default=(), repr=False)

    name: ClassVar[str] = "definition"

    def draft(self, rng: random.Random, depth: float, tokens: int, starts: Starts) -> Draft:
        """The package, read as a ring and turned so that the file with the definition begins at `depth`."""
        candidates = [text for text in self.haystack if _definitions(text)]
        for package in rng.sample(candidates, len(candidates)):  # one that is not repeated in the prompt
            if len(package) >= _CHARACTERS_OF_A_TOKEN * tokens or len(starts(package)) >= tokens:
                break
        else:
            raise RopeExtendError(
                f"the task {self.name} needs a package of at least {tokens:,} tokens, with a line "
                "`# path.py` above each file; give some with --data, such as those of tools/code_corpus.py, "
                "or shorter lengths"
            )
        package = package.rstrip("\n") + "\n"  # so that a path stands in its own line in the ring, too
        at, name = rng.choice(_definitions(package))
        paths: dict[str, str] = {}

        def invented(path: re.Match[str]) -> str:
            return f"# {paths.setdefault(path[1], _absent(rng, package, 1, lambda: _invented(rng))[0])}.py"

        ring = _FILE.sub(invented, package[at:] + package[:at])
        defined = next(each for each in _DEFINED.finditer(ring) if each[1] == name)
        reach = ring.index("\n", defined.end())  # the definition is in the prompt, also at its end

        def context(size: int) -> str:
            end = ring[-(1 << size.bit_length()) :]  # few lengths, because each text is tokenized
            first, last = starts(ring[: len(end)]), starts(end)

            def share(before: int) -> float:
                """The share of the tokens that are before the file, if `before` characters are."""
                earlier = len(last) - bisect_left(last, len(end) - before)
                return earlier / max(1, earlier + bisect_left(first, size - before))

            before = min(bisect_left(range(size), depth, key=share), max(0, size - reach))
            return ring[len(ring) - before :] + ring[: size - before]

        return Draft(
            "Below is source code of a Python package. The path of each file stands in a line above it.",
            context,
            f"Which file defines {name}?",
            f" The file that defines {name} is",
            (f"{next(iter(paths.values()))}.py",),
            reach,
        )

    def score(self, response: str, answers: Sequence[str]) -> float:
        """1 if the first path in the response is that of the file, else 0."""
        path = re.search(r"[\w/]+\.py\b", response)
        return float(path is not None and path[0] == answers[0])

    def finished(self, response: str, answers: Sequence[str]) -> bool:
        """Whether the first path is complete."""
        return re.search(r"\.py\b", response) is not None


_FILE = re.compile(r"^# (\S+\.py)$", re.MULTILINE)
_DEFINED = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
_CHARACTERS_OF_A_TOKEN = 5
"""More than a token of source code has: longer packages need not be tokenized to see that they suffice."""
_NEAR = 2000
"""Maximum distance in characters from the path of a file to the definition that is asked for."""


@cache
def _definitions(package: str) -> list[tuple[int, str]]:
    """The files of a package with a name that only its definition has: where they begin, and that name."""
    words = Counter(re.findall(r"\w+", package))
    found = []
    for path, following in pairwise([*_FILE.finditer(package), None]):
        assert path is not None
        end = following.start() if following else len(package)
        names = _DEFINED.finditer(package, path.end(), min(end, path.end() + _NEAR))
        if name := next((each[1] for each in names if words[each[1]] == 1 and len(each[1]) > 5), None):
            found.append((path.start(), name))
    return found


TASKS: dict[str, type[Task]] = {cls.name: cls for cls in (Passkey, Needle, MultiKey, ManyShot, Definition)}
"""The tasks by name."""


def make_tasks(
    names: Sequence[str], *, haystack: Sequence[str] = (), template: str = "published"
) -> list[Task]:
    """Make tasks from their names, each once; `haystack` goes to the tasks that have one."""
    texts = tuple(text for text in haystack if text.strip())
    options: dict[str, Any] = {"haystack": texts, "template": template}
    return [
        cls(**{item.name: options[item.name] for item in fields(cls) if item.name in options})
        for cls in (TASKS[name] for name in dict.fromkeys(names))
    ]


def _with_needles(
    source: str, needles: Sequence[tuple[float, str]], separator: str, starts: Starts
) -> Callable[[int], str]:
    """Takes a size in characters; returns that much of `source`, repeated, with needles at their depths."""

    def offset(depth: float, size: int) -> int:
        """The character where the token begins that has this share of the tokens before it."""
        # Few lengths, because each text is tokenized.
        tokens = starts(source[: 1 << size.bit_length()]) or [0]
        copies, rest = divmod(size, len(source))
        total = copies * len(tokens) + bisect_left(tokens, rest)
        copies, token = divmod(round(depth * total), len(tokens))
        return min(size, copies * len(source) + tokens[token])

    def context(size: int) -> str:
        text = (source * (size // len(source) + 1))[:size]
        ends = [0, *(match.end() for match in _SENTENCE_END.finditer(text))]
        if ends[-1] != size:
            ends.append(size)
        # The last needle first, so that the offsets of the needles before it stay valid.
        for depth, needle in sorted(needles, key=lambda pair: pair[0], reverse=True):
            at = _break_near(text, ends, offset(depth, size))
            left = text[:at]
            if left and not left.endswith((separator, "\n")):
                left = left.rstrip(" ") + separator
            text = left + (needle if needle.endswith("\n") else needle + separator) + text[at:]
        return text

    return context


def _break_near(text: str, ends: Sequence[int], offset: int) -> int:
    """The sentence end nearest to an offset; if none is near, the end of a word, or the offset itself."""
    after = min(bisect_left(ends, offset), len(ends) - 1)
    nearest = min(ends[max(0, after - 1) : after + 1], key=lambda end: abs(end - offset))
    if abs(nearest - offset) <= LONG_SENTENCE:
        return nearest
    space = text.rfind(" ", max(0, offset - LONG_SENTENCE), offset)
    return space + 1 if space >= 0 else offset


def _haystack(texts: Sequence[str], rng: random.Random) -> str:
    """One of the texts, or the filler without texts, starting at a random sentence."""
    text = rng.choice(texts) if texts else FILLER
    starts = [0, *(match.end() for match in _SENTENCE_END.finditer(text))]
    start = rng.choice(starts)
    if not texts:
        return text[start:] + text[:start]
    return f"{text[start:].rstrip()}\n{text[:start]}".rstrip() + "\n"


def _absent(rng: random.Random, text: str, count: int, draw: Callable[[], str]) -> list[str]:
    """Draw different strings that are not in the text."""
    strings: dict[str, None] = {}
    while len(strings) < count:
        drawn = draw()
        if drawn not in text:
            strings[drawn] = None
    return list(strings)


def _invented(rng: random.Random) -> str:
    """A word of three syllables that no language has."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))


_CODE_NOUNS = "node item path name line index value size count key file data".split()  # noqa: SIM905
_CODE_VERBS = "get set add load make read find check update parse write close".split()  # noqa: SIM905


def _code_line(rng: random.Random) -> str:
    """One line of plausible code. It has numbers too, so that the pass key is not the only one."""
    noun, other, verb = rng.choice(_CODE_NOUNS), rng.choice(_CODE_NOUNS), rng.choice(_CODE_VERBS)
    return rng.choice(
        (
            f"{noun} = {verb}_{other}({noun}, {rng.randint(0, 99)})",
            f"self.{noun} = {other}[{rng.randint(0, 9)}]",
            f"if {noun} is None: {other} = {rng.randint(0, 99)}",
            f"{noun}s.append({verb}_{other}({noun}))",
            f"for {noun} in {other}s: {verb}_{noun}({other})",
            f"return {verb}_{noun}({other}, {noun})",
        )
    )


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
