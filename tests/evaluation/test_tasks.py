"""Prompts have the exact length, and contain the answer exactly once."""

import copy
import re
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer

from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.prompts import (
    Prompt,
    Prompts,
    Task,
    depths_from,
    encode,
    make_prompt,
    make_prompts,
    uses_chat,
)
from rope_extend.evaluation.tasks import TASKS, ManyShot, MultiKey, Passkey, make_tasks, template_for

PLAIN = AutoTokenizer.from_pretrained(MODEL_DIR)
WITH_BOS = copy.deepcopy(PLAIN)
WITH_BOS.backend_tokenizer.post_processor = processors.TemplateProcessing(
    single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
)
CHATTY = copy.deepcopy(PLAIN)
CHATTY.chat_template = (
    "<|endoftext|>{% for message in messages %}[{{ message.role }}]\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TOKENIZERS = {"plain": PLAIN, "with BOS and EOS": WITH_BOS, "chat": CHATTY}
# Sentences of various lengths, numbers among them, and one text without any sentence.
BOOK = " ".join(
    f"On day {n} the {'very ' * (n % 7)}old ship came {n * 37 % 91} miles home!" for n in range(300)
)
TEXTS = (BOOK, "naïve café — " * 400)
PACKAGE = "\n".join(
    f"# pkg/part{n}.py\nimport pkg.part{n + 1}\n\ndef walk_{n}_home(miles):\n    return miles + {n}\n\n"
    f"def shared():\n    return shared(part{n})\n"
    for n in range(200)
)
# One file, cut to a number of tokens as documents are, and the name begins a word in the line before.
ALONE = "# pkg/alone.py\n# walk_homeward\ndef walk_home(miles):\n" + "    miles = miles + 1\n" * 1000
CASES = [
    *make_tasks([name for name in TASKS if name != "definition"]),
    *make_tasks(["definition"], haystack=(PACKAGE,)),
    Passkey(template="demo"),
    *make_tasks(["needle", "multi_key"], haystack=TEXTS),
]
WITH_DEPTH = [case for case in CASES if case.has_depth]
LENGTH = 1100  # more than the minimum of any task


def name_of(task: Task) -> str:
    return "-".join(str(value) for value in task.describe().values() if not isinstance(value, int))


@pytest.mark.parametrize("task", CASES, ids=name_of)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_prompts_have_the_exact_number_of_tokens(task: Task, tokenizer: Any) -> None:
    for length in (LENGTH, LENGTH + 1, LENGTH + 2, 2048):
        prompt = make_prompt(task, tokenizer, length, 0.4)
        read = tokenizer(prompt.text, add_special_tokens=not prompt.chat)["input_ids"]
        if tokenizer is WITH_BOS:
            assert (read[0], read[-1]) == (0, 0)
            read = read[:-1]  # the EOS would end the prompt before the answer
            read = read[read[:2] == [0, 0] :]  # one BOS, if the prompt has its own
        assert encode(tokenizer, prompt.text, prompt.chat) == read
        assert len(read) == prompt.tokens == length - task.new_tokens


MIXED = BOOK[:6000] + "".join(f"x_{n} = {{'k': [{n}, {n * n}], 'q': '#%$'}}\n" for n in range(200))
"""Prose, and then code, which has more tokens in as many characters."""


@settings(max_examples=20, deadline=None)
@given(
    number=st.integers(0, len(WITH_DEPTH)),
    length=st.integers(400, 3000),
    depth=st.floats(0, 1),
    trial=st.integers(0, 999),
)
def test_the_needle_is_at_its_depth_and_its_answer_nowhere_else(
    number: int, length: int, depth: float, trial: int
) -> None:
    task = [*WITH_DEPTH, *make_tasks(["needle"], haystack=[MIXED])][number]
    prompt = make_prompt(task, PLAIN, length, depth, trial)
    assert len(encode(PLAIN, prompt.text, False)) == length - task.new_tokens
    published = isinstance(task, Passkey) and task.template == "published"
    for answer in prompt.answers:  # the published needle says its key twice
        assert prompt.text.count(answer) == (2 if published else 1)
    # The offset of the answer in tokens, between the first and the last line of the prompt.
    first = prompt.text.find("\n") * ("hidden" in prompt.text[:80])
    last = prompt.text.rfind("\n", 0, prompt.text.rfind("What "))
    ends = (prompt.text.index(prompt.answers[0]), first, last)
    place, start, stop = (len(encode(PLAIN, prompt.text[:end], False)) for end in ends)
    needles = len(re.findall(r"magic numbers for [\w-]+ is:", prompt.text))  # they shift each other
    assert abs(place - (start + depth * (stop - start))) <= 80 + 40 * needles


@pytest.mark.parametrize("task", WITH_DEPTH, ids=name_of)
def test_no_two_prompts_of_a_part_are_near_copies(task: Task) -> None:
    """Else an interval over them says more than was measured. Each trial draws its depth in the part."""
    depths, spread = depths_from(4)
    assert (depths, spread) == ((0.125, 0.375, 0.625, 0.875), 0.25)
    made = make_prompts(task, PLAIN, 1100, Prompts(depths=depths, spread=spread, trials=6))
    assert len({prompt.drawn for prompt in made}) == 24
    assert all(abs(prompt.drawn - prompt.depth) <= spread / 2 for prompt in made)
    for depth in depths:
        texts = [re.sub(r"\d{4,}", "", prompt.text) for prompt in made if prompt.depth == depth]
        assert len({*texts}) == 6  # without their numbers


def test_the_demo_form_is_the_one_the_model_was_trained_on() -> None:
    assert (template_for(PLAIN), template_for(ByT5Tokenizer(extra_ids=0))) == ("demo", "published")
    for depth in (0, 0.5, 1):
        prompt = make_prompt(Passkey(template="demo"), PLAIN, 256, depth)
        assert encode(PLAIN, prompt.text, False)[0] == PLAIN.bos_token_id  # as documents begin in pretraining
        lines = prompt.text.removeprefix("<|endoftext|>").split("\n")
        assert lines[-2:] == ["# What is the pass key?", "PASS_KEY = "]
        at = lines.index("# Remember the pass key.")
        assert lines[at + 1] == f"PASS_KEY = {prompt.answers[0]}"
        assert len(PLAIN(prompt.answers[0])["input_ids"]) <= 10


@pytest.mark.parametrize("task", CASES, ids=name_of)
def test_a_prompt_follows_from_its_seed(task: Task) -> None:
    def made(**changes: Any) -> Prompt:
        return make_prompt(task, PLAIN, LENGTH, **{"depth": 0.5, "trial": 3, "seed": 7, **changes})

    assert made() == made()
    assert len({made(**one).answers for one in ({}, {"trial": 4}, {"seed": 8})}) == 3
    assert (made().depth is None) == (not task.has_depth)


def test_all_needles_are_in_the_prompt() -> None:
    prompt = make_prompt(MultiKey(), PLAIN, LENGTH)
    many = re.findall(r"magic numbers for ([\w-]+) is: (\d{7})\.", prompt.text)
    assert len(many) == len(dict(many)) == 4
    assert dict(many)[re.search(r"for ([\w-]+) mentioned", prompt.text)[1]] == prompt.answers[0]


def test_the_label_of_a_word_follows_from_its_examples() -> None:
    """Longer prompts have more examples of each word. No question answers another one."""
    shots, task = [], ManyShot(words=100, questions=30)
    for length in (1000, 2400):
        prompt = make_prompt(task, PLAIN, length, chat="off")
        lines = prompt.text.splitlines()[1:]
        examples, asked = ([line.split(": ") for line in each] for each in (lines[:-30], lines[-30:]))
        if set(lines[-31]) <= {*" ."}:  # fills the prompt to its exact length
            examples.pop()
        assert {*(line[0] for line in examples)} >= {word for word, _ in asked}
        assert len(dict(asked)) == 30
        assert [label for _, label in asked] == [*prompt.answers]
        assert {*map(tuple, asked)} <= {*map(tuple, examples)}
        assert len({*map(tuple, examples)}) == len(dict(examples))
        shots.append(len(examples))
    assert shots[0] < 100 < shots[1]
    assert task.score("river\n rivers\nanchor\n", ["river", "rivers", "anchor", "bell"]) == 0.5


@pytest.mark.parametrize("depth", [0, 0.3, 1])
@pytest.mark.parametrize(
    ("text", "trial"), [*((PACKAGE, trial) for trial in range(4)), (ALONE, 0)], ids=[*"0123", "alone"]
)
def test_the_file_of_a_definition_can_be_found_and_not_guessed(depth: float, text: str, trial: int) -> None:
    text = PLAIN.decode(PLAIN(text)["input_ids"][: LENGTH if text == ALONE else None])
    (task,) = make_tasks(["definition"], haystack=(text,))
    prompt = make_prompt(task, PLAIN, LENGTH, depth, trial, chat="off")
    lines = prompt.text.splitlines()
    name = re.match(r"Which file defines (\w+)\?", lines[-1])[1]
    assert len(re.findall(rf"\b{name}\b", prompt.text)) == 3  # in its definition, the question and the lead
    at = next(n for n, line in enumerate(lines) if line.startswith(f"def {name}("))
    path = next(line for line in reversed(lines[:at]) if re.fullmatch(r"# \w+\.py", line))
    assert path == f"# {prompt.answers[0]}"
    assert prompt.answers[0].removesuffix(".py") not in PACKAGE
    assert "# pkg/" not in prompt.text
    right = (f" {prompt.answers[0]}", f"`{prompt.answers[0]}`, not other.py")
    wrong = ("", "other.py", f"other.py or {prompt.answers[0]}", f"pkg/{prompt.answers[0]}")
    assert [task.score(said, prompt.answers) for said in (*right, *wrong)] == [1] * 2 + [0] * 4


@pytest.mark.parametrize("haystack", [(), (BOOK * 9,), (PACKAGE[:2000],)])
def test_definitions_need_packages_that_are_long_enough(haystack: tuple[str, ...]) -> None:
    (task,) = make_tasks(["definition"], haystack=haystack)
    with pytest.raises(RopeExtendError, match=r"needs a package of at least 1,\d+ tokens"):
        make_prompt(task, PLAIN, LENGTH)


def test_lines_are_filled_with_dots_of_two_tokens() -> None:
    """The tokens of a line are no multiple of a dot's, so the line to end with may be some lines back."""
    dots_apart = copy.deepcopy(PLAIN)
    dots_apart.backend_tokenizer.normalizer = normalizers.Replace(" .", " . ")
    assert len(encode(dots_apart, " .", False)) == 2
    for trial in range(20):
        prompt = make_prompt(ManyShot(), dots_apart, 1000, trial=trial, chat="off")
        assert len(encode(dots_apart, prompt.text, False)) == 1000


def test_many_shot_shows_each_word_or_refuses_the_length() -> None:
    for length in (200, 256, 280):
        with pytest.raises(RopeExtendError, match=r"many_shot needs about \d+ tokens"):
            make_prompt(ManyShot(), PLAIN, length, chat="off")
    for length in range(300, 480, 20):
        lines = make_prompt(ManyShot(), PLAIN, length, chat="off").text.splitlines()
        assert {*lines[-16:]} <= {*lines[:-16]}


def test_answers_are_scored_as_in_the_papers() -> None:
    key = Passkey()
    right = (" 12345", "12345.", "is 12345 and not 777", "12345\n99")
    assert [key.score(said, ["12345"]) for said in right] == [1, 1, 1, 1]
    assert [key.score(said, ["12345"]) for said in ("", "1234", "123456", "777 12345", "1 2345")] == [0] * 5
    finished = [key.finished(said, ["12345"]) for said in (" 12345", " 12345.", "77 ", "no")]
    assert finished == [False, True, True, False]
    needle, answers = MultiKey(), ["1111111", "2222222", "abc", "xyz"]
    assert needle.score("2222222, and ABC", answers) == 0.5
    assert needle.finished(" ".join(answers), answers)
    assert not needle.finished(" ".join(answers[1:]), answers)


def test_a_chat_template_encloses_everything_except_the_lead() -> None:
    prompt = make_prompt(Passkey(), CHATTY, 300)
    assert prompt.chat
    assert prompt.text.startswith("<|endoftext|>[user]\nThere is an important info")
    assert prompt.text.endswith("What is the pass key?\n[assistant]\nThe pass key is")
    assert not make_prompt(Passkey(), CHATTY, 300, chat="off").chat
    assert not uses_chat(PLAIN)
    with pytest.raises(RopeExtendError, match="no chat template"):
        uses_chat(PLAIN, "on")


def test_chat_templates_have_the_same_date_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3.2's asks for today: a measurement could not be resumed or compared tomorrow."""
    dated = copy.deepcopy(CHATTY)
    dated.chat_template = (
        "\n  {%- if strftime_now is defined %}{% set day = strftime_now('%d %b %Y, %F, %-d %e') %}{% endif %}"
        "{{ day }}\n" + CHATTY.chat_template
    )
    texts = set()
    for year in (2031, 2032):
        today = type("Day", (datetime,), {"now": classmethod(lambda cls, year=year: datetime(year, 1, 2))})
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", today)
        assert str(year) in dated.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        texts.add(make_prompt(Passkey(), dated, 300).text)
    (text,) = texts
    assert text.startswith("26 Jul 2024, 2024-07-26, 26 26\n<|endoftext|>[user]\nThere is")


def test_a_chat_template_that_fails_is_one_sentence() -> None:
    for template in ("{{ raise_exception('no system') }}", {"a": "", "b": ""}):
        failing = copy.deepcopy(PLAIN)
        failing.chat_template = template
        with pytest.raises(RopeExtendError, match=r"chat template fails: .*--chat off"):
            make_prompt(Passkey(), failing, 300)


def test_a_length_that_is_too_short_is_refused_with_the_minimum() -> None:
    with pytest.raises(RopeExtendError, match=r"passkey needs about (\d+) tokens") as error:
        make_prompt(Passkey(), PLAIN, 20)
    least = int(re.search(r"about (\d+)", str(error.value))[1])
    assert make_prompt(Passkey(), PLAIN, least).tokens == least - 10
    with pytest.raises(RopeExtendError, match="needs about"):
        make_prompt(Passkey(), PLAIN, least - 1)
