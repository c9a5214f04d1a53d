"""Prompts with an exact number of tokens: a task writes a draft, and its filler is cut to fit.

All random choices follow from a seed, so every method gets the same prompts on every machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from itertools import chain
from typing import Any, ClassVar

from rope_extend.errors import RopeExtendError
from rope_extend.progress import progress_bar
from rope_extend.units import format_length

CHAT = ("auto", "on", "off")
"""Whether prompts use the tokenizer's chat template; `auto` uses it if it exists."""


_DAY = datetime(2024, 7, 26)
"""Today, for chat templates that ask, so that prompts are the same tomorrow. It is Llama 3.2's default."""
_DATES = "".join(f" | replace('%{each}', '{_DAY.strftime('%' + each)}')" for each in "FTDRYymBbdeAaHIMSpj")
_ON_THAT_DAY = (
    f"{{%- macro strftime_now(format) -%}}{{{{ format | replace('%-', '%'){_DATES} }}}}{{%- endmacro %}}\n"
)
"""Replaces the function that gives the date to a template. transformers drops one that is passed by name."""


def depths_from(depths: int | Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Depths, and the width of the part of a prompt around each from which trials draw theirs.

    From a number of equal parts, each named by its middle, or from exact depths, whose width is 0.
    """
    if isinstance(depths, int):
        return tuple(round((n + 0.5) / depths, 6) for n in range(depths)), 1 / depths
    return tuple(depths), 0.0


@dataclass(frozen=True)
class Prompts:
    """The prompts of a retrieval measurement.

    Attributes:
        tasks: names of the tasks; empty for no prompts.
        lengths: tokens of the prompts.
        depths: depths of the needles, ascending.
        spread: width of the part of a prompt around each depth from which trials draw theirs.
        trials: prompts at each depth.
        seed: seed of all random choices.
        chat: whether to use the tokenizer's chat template: `auto` uses it if it exists, `on`, `off`.
        optional_length: the one length that is left out for a task that does not fit it, because nobody asked
            for it.
    """

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = depths_from(5)[0]
    spread: float = depths_from(5)[1]
    trials: int = 10
    seed: int = 0
    chat: str = "auto"
    optional_length: int | None = None


Starts = Callable[[str], Sequence[int]]
"""Takes a text; returns where its tokens begin, in characters, ascending."""


@dataclass(frozen=True)
class Draft:
    """A prompt whose length is not fixed yet.

    Attributes:
        opening: text before the context.
        context: returns the context with a given number of characters of filler.
        question: text after the context.
        lead: beginning of the answer, which the model continues.
        answers: the expected answers.
        least: characters of filler that hold what the question asks for.
    """

    opening: str
    context: Callable[[int], str]
    question: str
    lead: str
    answers: tuple[str, ...]
    least: int = 0

    def request(self, size: int, dots: int = 0) -> str:
        """The prompt without the lead; `dots` is the number of meaningless tokens after the context."""
        parts = (self.opening, self.context(size) + " ." * dots, self.question)
        lines = (part.rstrip(" ") for part in parts if part)
        return "".join(line if line.endswith("\n") else line + "\n" for line in lines)[:-1]


@dataclass(frozen=True)
class Prompt:
    """The prompt of one trial.

    Attributes:
        length: tokens of the prompt plus the tokens reserved for the answer.
        depth: requested depth of the needle, 0 at the start of the context and 1 at its end, in tokens; None
            for tasks without a depth.
        drawn: the depth of this trial, from the part of the prompt around `depth`.
        trial: number of the trial, from 0.
        text: text of the prompt, including the tokens of the chat template.
        answers: the expected answers.
        tokens: tokens of the prompt: exactly `length` minus the tokens reserved for the answer.
        chat: whether `text` uses the tokenizer's chat template.
    """

    task: str
    length: int
    depth: float | None
    trial: int
    text: str
    answers: tuple[str, ...]
    tokens: int
    chat: bool
    drawn: float | None = None

    def visible(self, crop: int | None) -> int:
        """Tokens that a model sees; the tokens reserved for the answer count in `crop`."""
        return self.tokens if crop is None else min(self.tokens, crop - (self.length - self.tokens))


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Sixteen hex digits that identify these prompts and their expected answers, in this order."""
    return joined_fingerprint(
        hashlib.sha256(json.dumps([each.text, each.answers, each.tokens]).encode()).hexdigest()[:16]
        for each in prompts
    )


def joined_fingerprint(fingerprints: Iterable[str]) -> str:
    """Sixteen hex digits for several fingerprints in this order; a single one stays as it is."""
    several = list(fingerprints)
    return several[0] if len(several) == 1 else hashlib.sha256("".join(several).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Task(ABC):
    """A kind of prompt, and how its answers are scored.

    Attributes:
        new_tokens: tokens reserved for the answer; part of a prompt's length.
    """

    new_tokens: int = 32

    name: ClassVar[str]
    has_depth: ClassVar[bool] = True
    """Whether the prompt has a needle at a depth."""
    in_place: ClassVar[bool] = False
    """Whether the prompt ends with lines whose last words are the answers; nothing is generated then."""

    @abstractmethod
    def draft(self, rng: random.Random, depth: float, tokens: int, starts: Starts) -> Draft:
        """Draw a prompt with the needle at `depth`, for a length of about `tokens`."""

    def score(self, response: str, answers: Sequence[str]) -> float:
        """Share of the answers that the response contains, ignoring case: RULER's score.

        If the answers are in place, the share of lines of the response that are the answer.
        """
        if self.in_place:
            lines = zip(response.split("\n"), answers, strict=True)
            return sum(line == answer for line, answer in lines) / len(answers)
        text = response.lower()
        return sum(answer.lower() in text for answer in answers) / len(answers)

    def finished(self, response: str, answers: Sequence[str]) -> bool:
        """Whether more tokens cannot change the score."""
        return self.score(response, answers) == 1

    def describe(self) -> dict[str, Any]:
        """The task's name and parameters, with a fingerprint of the haystack."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if values.get("haystack"):
            digest = hashlib.sha256("\0".join(values["haystack"]).encode())
            values["haystack"] = digest.hexdigest()[:16]
        return {"name": self.name, **{key: value for key, value in values.items() if value != ()}}


def uses_chat(tokenizer: Any, chat: str = "auto") -> bool:
    """Whether prompts use the tokenizer's chat template: `auto` uses it if it exists."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat == "on" and not has_template:
        raise RopeExtendError("chat is on, but the tokenizer has no chat template; use auto or off")
    return has_template if chat == "auto" else chat == "on"


def encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Token ids of a prompt's text. With `chat`, the text has its special tokens already."""
    from rope_extend.data.documents import once  # imports torch

    ids: list[int] = tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    ids = once(ids, text, tokenizer)
    # A tokenizer that appends EOS to every text would tell the model that nothing is left to answer.
    if not chat and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def last_tokens(ids: list[int], tokens: int, bos: int | None) -> list[int]:
    """The last `tokens` ids. A BOS token stays at the front, because models do worse without it."""
    if len(ids) > tokens and ids[0] == bos:
        return [ids[0], *ids[len(ids) - tokens + 1 :]]
    return ids[-tokens:]


def make_prompts(
    task: Task, tokenizer: Any, length: int, wanted: Prompts, *, progress: bool = False
) -> list[Prompt]:
    """All prompts of a task at a length, the first trial of all depths first.

    A task without a depth gets as many trials as other tasks get at all depths together.
    """
    words = f"writing prompts of {task.name}, {format_length(length)}"
    trials: list[tuple[float | None, int]]
    if task.has_depth:
        trials = [(depth, trial) for trial in range(wanted.trials) for depth in wanted.depths]
    else:
        trials = [(None, trial) for trial in range(wanted.trials * len(wanted.depths))]
    with progress_bar(shown=progress, iterable=trials, unit="prompt", desc=words, leave=False) as counted:
        return [
            make_prompt(
                task, tokenizer, length, depth, trial, wanted.spread, seed=wanted.seed, chat=wanted.chat
            )
            for depth, trial in counted
        ]


def make_prompt(
    task: Task,
    tokenizer: Any,
    length: int,
    depth: float | None = 0.5,
    trial: int = 0,
    spread: float = 0.0,
    *,
    seed: int = 0,
    chat: str = "auto",
) -> Prompt:
    """Write the prompt of one trial, with exactly `length − task.new_tokens` tokens.

    The tokens reserved for the answer count, as in RULER: a prompt at the length of a window stays within it.

    Args:
        length: tokens of prompt and answer.
        depth: depth of the needle, 0 … 1, as a share of the tokens, or of the words if the tokenizer does not
            tell where tokens begin. It is rounded to the nearest end of a sentence.
        trial: number of the trial; another number draws another prompt.
        spread: width of the part of the prompt around `depth` from which the trial's own depth is drawn.
        seed: random seed. The prompt follows from it and all of the above.
        chat: `auto`, `on` or `off`; see `uses_chat`.
    """
    from rope_extend.models.loading import one_error  # imports torch

    depth = depth if task.has_depth else None
    use_chat, prompt_tokens = uses_chat(tokenizer, chat), length - task.new_tokens
    rng = random.Random(f"{task.name}|{length}|{depth}|{trial}|{seed}")
    drawn = None if depth is None else min(1.0, max(0.0, depth + spread * (rng.random() - 0.5)))

    @cache
    def starts(text: str) -> Sequence[int]:
        if not getattr(tokenizer, "is_fast", False):
            return [match.start() for match in re.finditer(r"\S+", text)]
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [start for start, _ in found["offset_mapping"]]

    draft = task.draft(rng, 0.5 if drawn is None else drawn, max(1, prompt_tokens), starts)

    with one_error("the tokenizer's chat template fails", "Leave it out: --chat off, or chat='off'"):
        template = tokenizer.get_chat_template() if use_chat else ""
    template = _ON_THAT_DAY + template if "strftime_now" in template else None

    def write(size: int, dots: int = 0) -> str:
        request = draft.request(size, dots)
        if not use_chat:
            return request + draft.lead
        turn = [{"role": "user", "content": request}]
        with one_error("the tokenizer's chat template fails", "Leave it out: --chat off, or chat='off'"):
            text: str = tokenizer.apply_chat_template(
                turn, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        return text + draft.lead.lstrip()

    @cache  # a task that fills by lines writes the same text for several sizes
    def count(text: str) -> int:
        return len(encode(tokenizer, text, use_chat))

    minimum = count(write(draft.least))
    if minimum > prompt_tokens:
        raise RopeExtendError(
            f"the task {task.name} needs about {minimum + task.new_tokens} tokens ({minimum} of prompt, "
            f"{task.new_tokens} for the answer), got a length of {length}; use longer lengths"
        )
    text = _fit(write, count, prompt_tokens, draft.least)
    if text is None:
        raise RopeExtendError(
            f"the task {task.name} could not be written in exactly {prompt_tokens} tokens of this tokenizer; "
            "try a slightly different length"
        )
    return Prompt(task.name, length, depth, trial, text, draft.answers, prompt_tokens, use_chat, drawn)


def _fit(
    write: Callable[[int, int], str], count: Callable[[str], int], target: int, least: int
) -> str | None:
    """The text of exactly `target` tokens, by secant steps on its size; if need be, dots fill the rest.

    The text of size `least` has at most `target` tokens.
    """
    sizes: dict[int, int] = {}
    size, rate = 0, 1.0
    while size not in sizes and len(sizes) < 24:
        text = write(size, 0)
        sizes[size] = count(text)
        gap = target - sizes[size]
        if gap == 0:
            return text
        (low, few), (high, many) = min(sizes.items()), max(sizes.items())
        rate = (high - low) / (many - few) if many > few else rate
        size = max(0, size + (round(gap * rate) or (1 if gap > 0 else -1)))
    best = max(least, *(size for size, tokens in sizes.items() if tokens <= target))
    for reach in (16, 128):  # lines of a task are short, but a dot may be two tokens
        near = sorted(range(max(least, best - reach), best + 17), key=lambda size: abs(size - best))
        texts = (write(size, 0) for size in near)
        dotted = (write(size, dots) for size in near for dots in range(target - count(write(size, 0)), 0, -1))
        fitting = next((text for text in chain(texts, dotted) if count(text) == target), None)
        if fitting is not None:
            return fitting
    return None
