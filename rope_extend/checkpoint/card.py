"""The model card: what a checkpoint is, how it was made and measured, and the code that loads it correctly.

The wrong code does not fail: it silently loads the model with the original window. So the card only shows
code that works for this encoding in this form. If there is none, the card says why. `card.md` has its text.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from markupsafe import Markup

from rope_extend.checkpoint.manifest import read_json
from rope_extend.checkpoint.model_type import MODEL_TYPE
from rope_extend.checkpoint.record import Record, read_record
from rope_extend.checkpoint.staging import is_our_card, marked
from rope_extend.encodings import RopeEncoding
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, is_private, public_name, write_text
from rope_extend.models.checkpoint_directory import (
    CARD_NAME,
    CONFIG,
    PICTURE_NAME,
    TOKENIZER_CONFIG,
    is_adapter,
)
from rope_extend.models.locating import GGUF
from rope_extend.report.tables import markdown_code, markdown_text, number
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

_PICTURE = f"![Perplexity against length]({PICTURE_NAME})"
_MOST_NAMES = 20
"""Number of data sources that the card names."""
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_PARTS = re.compile(r"(.*?\n---\n\n# [^\n]*\n)(.*?)(\n## Loading\n.*)(\n## Limits\n.*)", re.DOTALL)
"""A card's front matter and title, what the model is and how it was measured, the code, and the limits."""
_UNKNOWN = "| data | not recorded |\n"
_FACTS = re.compile(r"^\| (?:data|training) \| .*\n", re.MULTILINE)
_RECIPE = (
    "steps", "batch_size", "gradient_accumulation", "learning_rate", "block_length", "lora_rank", "positions",
    "packing", "mixed_windows", "short_share",
)  # fmt: skip
"""What the card shows of a recipe, where it is in use."""
_PLAIN = (None, False, "consecutive", "none")


def model_card(
    directory: str | PathLike[str],
    *,
    results: str | None = None,
    data: str | Sequence[str] | None = None,
    perplexity: Mapping[int, float] | None = None,
    before: Mapping[int, float] | None = None,
    trained_in: str | PathLike[str] | None = None,
    name: str | None = None,
    trained_on: int = 0,
) -> str:
    """The text of a checkpoint's card, Markdown with the hub's front matter; it states no license.

    Args:
        results: the Markdown table of an evaluation, and its picture if there is one.
        data: the training data; default: the data of the run's recipe.
        perplexity: perplexity after training by length in tokens, if there are no `results`.
        before: the same before training.
        trained_in: directory of the run, with `recipe.yaml`; default: `directory`.
        name: the checkpoint's name in the code of the card; default: its directory's name.
        trained_on: number of documents of `perplexity` that are also training data.
    """
    directory = Path(expand_home(directory))
    record = read_record(directory)
    encoding: Any = record.encoding
    shape = record.shape
    adapter = is_adapter(directory)
    name = name or directory.resolve().name
    recipe = _recipe(Path(trained_in or directory))
    paper = encoding.paper
    if re.fullmatch(r"\d{4}\.\d{4,5}", paper):
        paper = Markup(f"[arXiv {paper}](https://arxiv.org/abs/{paper})")
    rotary = isinstance(encoding, RopeEncoding)
    guarded = not adapter and read_json(directory / CONFIG).get("model_type") == MODEL_TYPE
    curves = [("before training, extended", before), ("after training", perplexity)] if perplexity else []
    text: str = _template().render(
        front_matter=_front_matter(record, adapter), name=name, adapter=adapter, encoding=encoding,
        shape=shape, window=record.target_length, trained=shape.trained_length, rotary=rotary, paper=paper,
        model_type=record.model_type, base_model=record.base_model, versions=record.versions,
        parameters=json.dumps({key: value for key, value in encoding.to_dict().items() if key != "name"}),
        changes_short_texts=rotary and not encoding.inv_freq(shape).equal(shape.inv_freq()),
        data=data or recipe.pop("data", None), recipe=recipe, trained_on=trained_on,
        results=None if results is None else Markup(results.strip()),
        curves=[(title, curve) for title, curve in curves if curve], lengths=sorted(perplexity or ()),
        guarded=guarded,
        tokenizer=(directory / TOKENIZER_CONFIG).exists(), gguf=(record.base_model or "").endswith(GGUF),
    )  # fmt: skip
    return text


def write_card(
    directory: str | PathLike[str], *, draw: Callable[[Path], object] | None = None, **options: Any
) -> Path | None:
    """Write `README.md`, and the picture if there is one; returns the card's path.

    A `README.md` that somebody else wrote or edited stays; the return value is then None. So does a picture
    that is not the one of our card; the card then has none.

    `draw` writes the picture of the results into the file whose path it is given; `options` are keyword
    arguments of `model_card`.
    """
    path = Path(expand_home(directory)) / CARD_NAME
    picture = path.with_name(PICTURE_NAME)
    try:
        ours = is_our_card(path)
        if os.path.lexists(path) and not ours:
            logger.info("%s was written or edited by somebody else; it is not replaced", path)
            return None
        free = not os.path.lexists(picture) or (ours and _PICTURE in path.read_text(encoding="utf-8"))
        if free and (results := options.get("results")) is not None:
            options["results"] = f"{results.strip()}\n\n{_PICTURE}"
        text = model_card(directory, **options)
        if ours and _UNKNOWN in text:  # merged weights have no recipe, but their card has its facts
            rows = _FACTS.findall(path.read_text(encoding="utf-8"))
            text = text.replace(_UNKNOWN, "".join(rows) or _UNKNOWN)
        if draw is not None and free:
            draw(picture)
        elif draw is not None:
            logger.warning("%s is not replaced: it is not the picture of a card of ours", picture)
        write_text(path, marked(text))
    except OSError as error:
        raise RopeExtendError(f"cannot write {path}: {error}") from error
    return path


def add_card(directory: str | PathLike[str], **options: Any) -> None:
    """`write_card` after the work is done: an error is logged, not raised."""
    try:
        write_card(directory, **options)
    except Exception as error:  # the model is worth more than its card
        logger.warning("no model card: %r", error)


def carry_card(source: Path, directory: Path, name: str) -> None:
    """Write the card of an export: the facts of its source's card, with a title and code of its own.

    A card that somebody else wrote or edited is left as it was copied, and a source without a card has none.
    """
    if is_our_card(source / CARD_NAME):
        ours = _PARTS.fullmatch(model_card(directory, name=name))
        text, _, _ = (source / CARD_NAME).read_text(encoding="utf-8").rpartition("\n<!--")
        if ours and (theirs := _PARTS.fullmatch(text)):
            write_text(directory / CARD_NAME, marked(ours[1] + theirs[2] + ours[3] + theirs[4]))


def _front_matter(record: Record, adapter: bool) -> Markup:
    data: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rope_extend", "long-context", record.encoding.name, *(["lora"] if adapter else [])],
    }
    name = record.base_model or ""
    if _HUB_ID.fullmatch(name) and not (name.lower().endswith(GGUF) or os.path.exists(name)):
        data = {"base_model": name, **data}
    return Markup(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _listed(value: str | Sequence[str]) -> str:
    """Names of models or data; of local paths only the last part."""
    names = [value] if isinstance(value, str) else list(value)
    shown = [
        f"{markdown_code(public_name(name))}{' (a local path)' if is_private(name) else ''}"
        for name in names[:_MOST_NAMES]
    ]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _recipe(directory: Path) -> dict[str, Any]:
    """What the card shows of a run's recipe; empty, with a warning, if it cannot be read."""
    path = directory / "recipe.yaml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        logger.warning("%s is not shown in the card: %s", path, str(error)[:500])
        return {}
    settings = settings if isinstance(settings, dict) else {}
    full, mixed = settings.get("lora_targets") == "none", settings.get("mixed_windows")
    unused = {"lora_rank": full, "short_share": not mixed}
    used = (key for key in _RECIPE if settings.get(key) not in _PLAIN and not unused.get(key))
    shown = {key: settings[key] for key in used}
    data = settings.get("data")
    names = data if isinstance(data, list) else [data]
    # By aliases, lists of lists can be longer than their file.
    return {
        **{key: value for key, value in shown.items() if isinstance(value, str | int | float)},
        "data": [name for name in names if isinstance(name, str)],
    }


_FILTERS: Mapping[str, Callable[[Any], str]] = {
    "code": lambda value: Markup(markdown_code(value, longest=4000)),
    "names": lambda value: Markup(_listed(value) if value else "not recorded"),
    "python": lambda value: Markup(json.dumps(value, ensure_ascii=False)),
    "shell": lambda value: Markup(quote(value)),
    "number": number,
    "tokens": format_length,
}
"""The forms of a value in the card. Without one of them, it is plain text of one line."""


@cache
def _template() -> Any:
    """`card.md`, in which every value is plain text unless a filter says otherwise."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else markdown_text(value),
    )  # fmt: skip
    environment.filters |= _FILTERS
    return environment.get_template("card.md")
