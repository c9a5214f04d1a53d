"""Prompts of an exact number of tokens: a task writes a draft, and its filler is cut to fit.

Everything random follows from a seed, so that every method and every machine reads the same prompts.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from rope_extend.errors import RopeExtendError

CHAT = ("auto", "on", "off")


@dataclass(frozen=True)
class Draft:
    """A prompt but for its length.

    Attributes:
        opening: what comes before the context.
        context: the context at a size, which grows with it; in characters of filler, or in words of a list.
        question: what comes after it.
        lead: how the answer begins, written for the model.
        answers: what the model has to say.
        needle: the piece of the context whose place is the depth; None if the task has no such place.
        words: whether sizes count words.
    """

    opening: str
    context: Callable[[int], str]
    question: str
    lead: str
    answers: tuple[str, ...]
    needle: str | None = None
    words: bool = False

    def request(self, size: int, dots: int = 0) -> str:
        """All but the lead; ``dots`` are meaningless tokens at the end of the context."""
        parts = (self.opening, self.context(size) + " ." * dots, self.question)
        lines = (part.rstrip(" ") for part in parts if part)
        return "".join(line if line.endswith("\n") else line + "\n" for line in lines)[:-1]


@dataclass(frozen=True)
class Prompt:
    """One trial's prompt.

    Attributes:
        task: the task's name.
        length: tokens of the prompt and of the room for the answer together.
        depth: where the needle was asked for, 0 at the start of the context and 1 at its end; None for tasks
            that have no such place.
        trial: number of the trial, from 0.
        text: what the model reads, the chat template's own tokens included.
        answers: what it has to say.
        tokens: tokens of the prompt: ``length`` less the room for the answer, exactly.
        distance: tokens from where the needle begins to the end of the prompt: the k of 2306.15595.
        chat: whether ``text`` went through the tokenizer's chat template.
    """

    task: str
    length: int
    depth: float | None
    trial: int
    text: str
    answers: tuple[str, ...]
    tokens: int
    distance: int | None
    chat: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return {**asdict(self), "answers": list(self.answers)}


@dataclass(frozen=True)
class Task(ABC):
    """A kind of prompt, and how an answer to it is scored.

    Attributes:
        new_tokens: room for the answer, in tokens; part of a prompt's length.
    """

    new_tokens: int = 32

    name: ClassVar[str]
    paper: ClassVar[str]
    placed: ClassVar[bool] = True
    """Whether there is a needle with a depth."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int) and value < 1:
                raise RopeExtendError(f"{self.name}: {one.name} must be at least 1, got {value}")

    @abstractmethod
    def draft(self, rng: random.Random, depth: float, tokens: int) -> Draft:
        """Draw a prompt whose needle lies at ``depth``, for a length of about ``tokens``."""

    def score(self, response: str, answers: Sequence[str]) -> float:
        """Share of the answers that the response contains, letter case aside: RULER's score."""
        said = response.lower()
        return sum(answer.lower() in said for answer in answers) / len(answers)

    def finished(self, response: str, answers: Sequence[str]) -> bool:
        """Whether no further token can change the score."""
        return self.score(response, answers) == 1

    def describe(self) -> dict[str, Any]:
        """The task's name and parameters; of the haystack, a fingerprint."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if values.get("haystack"):
            digest = hashlib.sha256("\0".join(values["haystack"]).encode())
            values["haystack"] = digest.hexdigest()[:16]
        return {"name": self.name, **{key: value for key, value in values.items() if value != ()}}


def uses_chat(tokenizer: Any, chat: str = "auto") -> bool:
    """Whether prompts go through the tokenizer's chat template: with ``auto``, if it has one.

    Raises:
        RopeExtendError: ``on`` without a template, or another word.
    """
    if chat not in CHAT:
        raise RopeExtendError(f"chat must be one of {', '.join(CHAT)}, got {chat!r}")
    has = bool(getattr(tokenizer, "chat_template", None))
    if chat == "on" and not has:
        raise RopeExtendError("chat is on, but the tokenizer has no chat template; use auto or off")
    return has if chat == "auto" else chat == "on"


def encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Token ids of a prompt's text; a chat template has written its special tokens itself."""
    ids: list[int] = tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    # A tokenizer that ends every text would tell the model that there is nothing to answer.
    if not chat and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def make_prompt(
    task: Task,
    tokenizer: Any,
    length: int,
    depth: float | None = 0.5,
    trial: int = 0,
    *,
    seed: int = 0,
    chat: str = "auto",
) -> Prompt:
    """Write the prompt of one trial, of exactly ``length − task.new_tokens`` tokens.

    The room for the answer counts, as in RULER: a task at the length of a window stays within it.

    Args:
        task: what to ask.
        tokenizer: the model's.
        length: tokens of prompt and answer.
        depth: where the needle lies, 0 … 1; to the nearest end of a sentence.
        trial: number of the trial; another one draws another prompt.
        seed: of everything random, with all of the above.
        chat: ``auto``, ``on`` or ``off``; see :func:`uses_chat`.

    Raises:
        RopeExtendError: the task does not fit this length, or a value is out of range.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise RopeExtendError(f"a depth lies between 0 and 1, got {depth}")
    depth = depth if task.placed else None
    templated, wanted = uses_chat(tokenizer, chat), length - task.new_tokens
    rng = random.Random(f"{task.name}|{length}|{depth}|{trial}|{seed}")
    draft = task.draft(rng, 0.5 if depth is None else depth, max(1, wanted))

    def written(size: int, dots: int = 0) -> str:
        request = draft.request(size, dots)
        if not templated:
            return request + draft.lead
        turn = [{"role": "user", "content": request}]
        text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return text + draft.lead.lstrip()

    def count(text: str) -> int:
        return len(encode(tokenizer, text, templated))

    least = count(written(0))
    if least > wanted:
        raise RopeExtendError(
            f"the task {task.name} needs about {least + task.new_tokens} tokens ({least} of prompt, "
            f"{task.new_tokens} for the answer), got a length of {length}; give longer lengths"
        )
    text = _fitted(lambda size, dots: written(size, dots), count, wanted, coarse=draft.words)
    if text is None:
        raise RopeExtendError(
            f"the task {task.name} could not be written in exactly {wanted} tokens of this tokenizer; try a "
            "length that is a little different"
        )
    distance = None
    if depth is not None and draft.needle is not None:
        distance = wanted - count(text[: text.index(draft.needle)])
    return Prompt(task.name, length, depth, trial, text, draft.answers, wanted, distance, templated)


def _fitted(
    written: Callable[[int, int], str], count: Callable[[str], int], wanted: int, *, coarse: bool
) -> str | None:
    """The text of exactly ``wanted`` tokens, by secant steps on its size; dots fill what they leave.

    A size in characters can nearly always be exact, a ``coarse`` one in words seldom.
    """
    sizes: dict[int, int] = {}
    size, rate = 0, 0.05 if coarse else 1.0
    while size not in sizes and len(sizes) < 24:
        text = written(size, 0)
        sizes[size] = count(text)
        gap = wanted - sizes[size]
        if gap == 0:
            return text
        (low, few), (high, many) = min(sizes.items()), max(sizes.items())
        rate = (high - low) / (many - few) if many > few else rate
        size = max(0, size + (round(gap * rate) or (1 if gap > 0 else -1)))
    best = max(size for size, tokens in sizes.items() if tokens <= wanted)
    near = sorted(range(max(0, best - 16), best + 17), key=lambda size: abs(size - best))
    for size in () if coarse else near:
        text = written(size, 0)
        if count(text) == wanted:
            return text
    for size in near:
        gap = wanted - count(written(size, 0))
        for dots in range(gap, 0, -1):
            text = written(size, dots)
            if count(text) == wanted:
                return text
    return None
