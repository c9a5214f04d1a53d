"""Write docs/methods/NAME.md and its picture, for each method: all but the formula and when to use it.

Those two sections are written by hand. A method without a page gets one with a formula to fill in.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING
from pathlib import Path

from method_numbers import factors, numbers
from method_pictures import MODEL, ROTARY, SHOWN, caption, draw_method, example, linked, target_of

from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.encodings import Encoding, Learned, RopeEncoding, encoding_class, encoding_names
from rope_extend.report.tables import markdown_table

PAGES = Path(__file__).parent.parent / "docs" / "methods"
NEW = "## Formula\n\n```math\n```\n\n```python\n```\n\n## When to use it\n\n**Good for:**\n\n**Not for:**"
ENGINES = {"transformers": "transformers", "vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
PAGE = """\
# {name}

<!-- Formula and When to use it are written by hand, all else by tools/write_methods.py -->

{text}

Use it: {use}

![{caption}](pictures/{name}.svg)

{caption} The model is that of [In numbers](#in-numbers).
[Symbols](../methods.md#symbols) are the same on all pages.

{by_hand}

## Parameters

{parameters}

## In numbers

{shape}

{numbers}

## Where it runs

{support}

[saving.md](../saving.md#export) explains the words. Other families of models can differ.

## Measured

<!-- measured -->

[results.md](../results.md) and [training_free.md](../training_free.md) have what was measured, with
the controls.

## Source

{source}. In the code: [{file}](../../{file}).
"""


def page(name: str, by_hand: str) -> str:
    """The page of a method, with the sections that are written by hand."""
    cls = encoding_class(name)
    return PAGE.format(
        name=name,
        text=_text(cls),
        use=_use(name),
        caption=caption(name),
        by_hand=by_hand.strip(),
        parameters=_parameters(cls),
        shape=_shape(name),
        numbers="\n\n".join([markdown_table(numbers(name)).strip(), *factors(name)]),
        support=_support(name),
        source=linked(cls.paper),
        file=f"{cls.__module__.replace('.', '/')}.py",
    )


def by_hand(text: str) -> str:
    """The sections of a page that are written by hand."""
    found = re.search(r"^## Formula\n.*?(?=^## Parameters|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else NEW


def _shape(name: str) -> str:
    """The model of the numbers, in words."""
    window = f"a trained window of {ROTARY.trained_length:,} tokens, extended to {target_of(name):,}"
    encoding = example(name)
    if isinstance(encoding, RopeEncoding):
        return f"For {ROTARY.dim} rotated channels per head, base {ROTARY.theta:,.0f} and {window}:"
    first = "; learned parameters have their first values" if encoding.initial(MODEL) else ""
    if isinstance(encoding, Learned):
        first = "; the table has a row for each token of the trained window"
    return f"For {MODEL.heads} heads, {MODEL.hidden_size} channels of an embedding and {window}{first}:"


def _use(name: str) -> str:
    """How to choose the method, in Python and on the command line."""
    shown, python, flag = SHOWN.get(name, name), "", ""
    if name == "longrope":  # its divisors have no default
        python, flag = ", long_factor=[...]", " --method-parameters long_factor=TABLE"
    quoted = f"'{shown}'" if "(" in shown else shown
    return f'`rx.extend(model, "32k", "{shown}"{python})`, or `--method {quoted}{flag}` on the command line.'


def _text(cls: type[Encoding]) -> str:
    """The documentation of a class, without its parameters."""
    return (inspect.getdoc(cls) or "").partition("\nAttributes:")[0].strip()


def _parameters(cls: type[Encoding]) -> str:
    """The parameters with their defaults, as a table."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        meanings |= _meanings(base.__dict__.get("__doc__") or "")
    rows = [["parameter", "default", "meaning"]]
    for field in cls._fields():
        default = "follows from the target length"
        if field.default is not MISSING:
            default = {None: "none", 1 / 16: "1/16"}.get(field.default, f"`{field.default}`")
        elif field.default_factory is not MISSING:
            default = "plain RoPE"
        elif field.name == "long_factor":
            default = "required"
        rows.append([f"`{field.name}`", default, meanings[field.name]])
    if len(rows) == 1:
        return "None."
    return _table(rows)


def _meanings(doc: str) -> dict[str, str]:
    """The meaning of each parameter in the documentation of a class, which may have several lines."""
    _, _, attributes = inspect.cleandoc(doc).partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\S|\Z)", attributes, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()).replace("|", "\\|") for name, text in found}


def _support(name: str) -> str:
    """Where the method runs, with the reason, as a table."""
    rows = [["engine", "support", "how, or why not"]]
    for target in TARGETS:
        found = support(example(name), ROTARY, target, target_length=target_of(name))
        rows.append([ENGINES[target], found.verdict, found.reason])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    """A Markdown table of texts, all to the left."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write() -> None:
    """Write all pages and pictures."""
    PAGES.mkdir(exist_ok=True)
    for name in encoding_names():
        file = PAGES / f"{name}.md"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(page(name, by_hand(text)), encoding="utf-8")
        draw_method(name, PAGES / "pictures" / f"{name}.svg")


if __name__ == "__main__":
    write()
