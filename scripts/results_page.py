"""docs/results.md from the lines of docs/results/results.jsonl: tables, sentences, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from page_parts import filled
from results_lines import SEARCH, TRAINING, is_last_step
from results_rows import Results, books_text, longest_of, machines, rank, results_of, seconds
from results_says import by, has_parts, says
from rope_extend.study.cells import PERPLEXITY, RETRIEVAL
from smollm2 import SOURCE

from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.position_maps import String
from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.controls import (
    against_cropped,
    against_trained_control,
    regressions,
    trained_when_cropped,
)
from rope_extend.evaluation.results import EvaluationRow, RetrievalResult
from rope_extend.evaluation.statistics import ppl
from rope_extend.evaluation.tasks import TASKS
from rope_extend.report.tables import markdown_table, number
from rope_extend.study.study_config import StudyConfig
from rope_extend.training.recipe import Recipe
from rope_extend.units import format_duration, format_length

CONFIGS = Path(__file__).parent.parent / "configs" / "results"
OF_PROMPTS = ("passkeys", "tasks")
"""Stages that measure answers to prompts alone."""

HEAD = """\
# A real model's numbers

<!-- written by scripts/make_results.py -->

{source}. The model was trained on {trained} tokens.
Weights in {dtype}, on {machine}.{precision}

    make results DATA=books TRAINING_DATA=other-books

- {download}All measurements so far took {hours} of computing, without the evaluations during LoRA.
- `DATA` names long documents to measure on, and `TRAINING_DATA` others for LoRA and the search. `QUICK=1`
  makes a smaller table.
- It can be stopped at any time. The same command measures what is missing. In a new clone too: lines of the
  same weights, texts and settings count as measured. Only the LoRA runs themselves are not in the repository.
- Every figure below is computed from the lines of [results/results.jsonl](results/results.jsonl). Each is one
  row on one document, or on one prompt.

The texts are the first {longest} tokens of {books}. The digits identify these tokens, whatever the file is
called:

{texts}

Perplexity is over the first N tokens of each book, weighted by tokens. Compare down a column, not along a
row: the columns differ in their text.
"""

OWN = """\
## Your own model

One command makes these tables for your model and your texts, and says which method to use or whether to
train:

    rope-extend report MODEL --target-length 32k --data path/to/long/documents --output report

`--plan` prints how long it takes. `--budget 2h` stops after two hours, and `--resume` continues. An adapter's
directory adds a row. From Python: `rx.compare_methods(rx.StudyConfig(...))`.
"""


def page(results: Results, source: str) -> str:
    """The whole page as Markdown."""
    parts = [_head(results, source)]
    if said := says(results):
        items = [filled(f"**{subject}.** {text}", "- ") for subject, text in said.items()]
        parts.append(_section("In short", "\n".join(items)))
    untrained = [row for row in results.rows if row.adapter is None]
    if untrained:
        text = "None of these rows changes a weight."
        drawn = ""
        if results.near:
            drawn = "![Perplexity divided by that of the cropped context, by length](results/ratio.svg)"
        parts.append(_section("Without training", text, table(results, untrained), *_notes(results), drawn))
    parts += list(_other_targets(results))
    parts += list(_retrieval(results))
    tuned = [row for row in results.rows if row.adapter is not None]
    if tuned:
        controls = [row for row in untrained if row.label.startswith("none")]
        text = _training_text(results)
        figures = table(results, [*controls, *tuned])
        parts.append(_section("After one LoRA run each", text, figures, *_notes_of_training(results)))
    parts += list(_by_step(results))
    parts += list(_searched(results))
    parts += list(_missing(results))
    return "\n".join([*parts, OWN])


def _section(heading: str, *parts: str) -> str:
    return "\n\n".join([f"## {heading}", *(part for part in parts if part)]) + "\n"


def _head(results: Results, source: str) -> str:
    perplexities = results.lines_of_target
    shown = list(zip(results.collected.texts, results.collected.documents, strict=True))
    return HEAD.format(
        source=source, download="It downloads the model through pip. " if source == SOURCE else "",
        trained=f"{results.trained:,}", dtype=(perplexities or results.lines)[0]["dtype"],
        machine=" and ".join(machines(results.lines)), hours=format_duration(seconds(results.lines)),
        longest=f"{results.longest:,}", precision=_precision(results),
        books=results.books,
        texts="\n".join(f"- `{text}`, in `{name}`" for text, name in shown),
    )  # fmt: skip


def _precision(results: Results) -> str:
    """How far bfloat16 is from float32, in the rows that were measured in both on the same texts.

    Texts are known by their tokens. Those of two lengths have other digits, even of one book.
    """
    losses: dict[str, dict[tuple[str, str, str], tuple[float, int]]] = {"float32": {}, "bfloat16": {}}
    for line in results.of_kind(PERPLEXITY):
        if line["dtype"] in losses:
            nll, terms = line["result"]["document_nll"], line["result"]["document_terms"]
            data = line["result"]["data"]
            found = {(n, line["label"], data): (nll[n][0], terms[n][0]) for n in nll}
            losses[line["dtype"]] |= {key: value for key, value in found.items() if value[0] is not None}
    both = set(losses["float32"]) & set(losses["bfloat16"])
    if not both:
        return ""
    length = max((length for length, _, _ in both), key=int)
    books = len({data for n, _, data in both if n == length})
    said = []
    for label in sorted({label for n, label, _ in both if n == length}, key=rank):
        shared = sorted(key for key in both if key[:2] == (length, label))
        wide, narrow = (
            ppl(sum(found[key][0] for key in shared) / sum(found[key][1] for key in shared))
            for found in losses.values()
        )
        pairs = [(losses["float32"][key], losses["bfloat16"][key]) for key in shared]
        most = max(abs(ppl((small - large) / terms) - 1) for (large, terms), (small, _) in pairs)
        said.append(f"`{label}` {wide:.3f} and {narrow:.3f} ({100 * most:.2f} %)")
    return "\n" + filled(
        f"Perplexity in float32 and in bfloat16, at {format_length(int(length))} tokens of "
        f"{books_text(books)}, and the largest difference on one book: {', '.join(said)}. Other "
        "rows can differ by more, and so can a row of which another number of tokens is processed at a time."
    )


def table(results: Results, rows: Sequence[EvaluationRow]) -> str:
    """Perplexity by length, against cropping at the longest length, and within the trained window."""
    lengths = sorted(rows[0].result.ppl)
    gains = _gains(results)
    costs = {each.row.label: each.ratio for each in regressions(results.rows)}
    short = format_length(results.trained)
    head = [
        "",
        *map(format_length, lengths),
        f"{format_length(lengths[-1])} / cropped (95 %)",
        f"{short} / none",
    ]
    lines = [head]
    for row in rows:
        cost = costs.get(row.label)
        lines.append(
            [
                row.label,
                *(_shown(row.result.ppl[length]) for length in lengths),
                _ratio(gains.get(row.label)),
                "–" if cost is None or not math.isfinite(cost) else f"{cost:.3f}",
            ]
        )
    return markdown_table(lines)


def _gains(results: Results) -> dict[str, Comparison]:
    """Each row, also a control with training, against the cropped context, by label."""
    found = (*against_cropped(results.rows), *trained_when_cropped(results.rows))
    return {gain.second.label: gain for gain in found}


def _other_targets(results: Results) -> Iterator[str]:
    """A table for each longer target, and for each shorter one with rows of its own, such as `string`."""
    for length in results.other_targets:
        others = results_of(results.lines, length)
        added = {row.label for row in others.rows} - {row.label for row in results.rows}
        if not others.rows or (length < results.longest and not added):
            continue
        names = " and ".join(f"`{name}`" for name in sorted(added))
        books, documents = others.books, others.collected.documents
        if documents != results.collected.documents:
            books += f": {', '.join(f'`{name}`' for name in documents)}"
        text = f"The rows of this table are extended to {format_length(length)}, over {books}."
        if "string" in added:
            text += f" {_reach_of_string(results)}"
        heading = f"{names} at {format_length(length)}" if names else f"At {format_length(length)}"
        yield _section(heading, filled(text), table(others, others.rows))


def _reach_of_string(results: Results) -> str:
    shape = RopeShape(dim=64, theta=1e5, trained_length=results.trained)
    string = String.for_target(shape, results.trained)
    longest = replace(string, shift=results.trained).target_length(shape)
    return f"`string` reaches {longest:,} tokens at most, with its default of {string.local} for `local`."


def _shown(value: float | None) -> str:
    """A perplexity; a dash if there is none, or if it is not finite."""
    return number(value if value is not None and math.isfinite(value) else None)


def _ratio(gain: Comparison | None) -> str:
    if gain is None:
        return "–"
    change = gain.differences[-1]
    if not math.isfinite(change.ratio):
        return "–"
    if change.low is None or change.high is None:
        return f"{change.ratio:.3f}"
    return f"{change.ratio:.3f} ({ppl(change.low):.3f}–{ppl(change.high):.3f})"


def _notes(results: Results) -> Iterator[str]:
    short = format_length(results.trained)
    yield "\n".join(
        [
            f"- `none, cropped to {short}` is the control: the same tokens are scored, but the model sees "
            f"{results.trained:,} of them at a time.",
            "- `/ cropped`: perplexity divided by that of the control, with its interval over books. "
            "Below 1, the longer context helps.",
            f"- `{short} / none`: perplexity of texts within the window, divided by that of plain RoPE.",
        ]
    )


def _retrieval(results: Results) -> Iterator[str]:
    """Tables of retrieval: by depth if a task has one, else by length."""
    answered = results.collected.retrieval
    for task in dict.fromkeys(task for each in answered for task in each.tasks):
        for length in sorted({n for each in answered for n in each.lengths(task)}, reverse=True):
            rows = [each for each in answered if length in each.lengths(task)]
            yield _section(
                f"{task} at {format_length(length)}",
                _prompts(rows, task, length),
                _depths(rows, task, length),
            )


def _prompts(rows: Sequence[RetrievalResult], task: str, length: int) -> str:
    counts = sorted({sum(len(cell.scores) for cell in row.at(task, length)) for row in rows})
    words = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    share = "Share of the answers found" if has_parts(task) else "Share of prompts solved"
    words += " prompt" if words == "1" else " prompts"
    return f"{share}, {words} for each row, with the 95 % interval in percent."


def _depths(rows: Sequence[RetrievalResult], task: str, length: int) -> str:
    depths = sorted({depth for row in rows for depth in row.depths(task)})
    lines = [["", "all", *(f"depth {depth:g}" for depth in depths)]]
    for row in rows:
        rates = [row.rate(task, length, depth) for depth in depths]
        cells = ["–" if rate is None else f"{rate.mean:.0%}" for rate in rates]
        lines.append([row.label, str(row.rate(task, length)), *cells])
    return markdown_table(lines)


def _training_text(results: Results) -> str:
    last = {line["run"]: line for line in results.of_kind(TRAINING) if is_last_step(line)}
    if not last:
        return ""
    tokens = " or ".join(f"{count:,}" for count in sorted({line["tokens"] for line in last.values()}))
    hours = format_duration(sum(line["seconds"] for line in last.values()) / len(last))
    trained_on = [line.get("trained_on") for line in last.values()]
    texts = "other books" if all(count == 0 for count in trained_on) else "text"
    if any(trained_on):
        texts = "text that is measured on too"
    return filled(
        f"LoRA on {tokens} tokens of {texts}, in blocks of 2,048 tokens with positions from the whole "
        f"target window (PoSE): `configs/results/lora.yaml`. A run took {hours} on average."
    )


def _notes_of_training(results: Results) -> Iterator[str]:
    """What rows with an adapter are whose labels do not say it."""
    notes = [
        filled(
            f"`{control.label}` is the control with training: the same LoRA run within the old window, "
            "and the text cropped to it.",
            "- ",
        )
        for control in (gain.second for gain in trained_when_cropped(results.rows))
    ]
    notes += [
        f"- `{row.label}` was trained with the table of `{name}`."
        for row in results.rows
        if row.adapter is not None and (name := Path(row.adapter).name) in _searches(results)
    ]
    if notes:
        yield "\n".join(notes)


def _searches(results: Results) -> set[str]:
    return {line["name"] for line in results.of_kind(SEARCH)}


def _by_step(results: Results) -> Iterator[str]:
    """Perplexity at the longest length by step, for each run that was evaluated more than twice."""
    found = results.of_kind(TRAINING)
    runs = {
        run: [line for line in found if line["run"] == run]
        for run in dict.fromkeys(one["run"] for one in found)
    }
    runs = {run: lines for run, lines in runs.items() if len(lines) > 2}
    if not runs:
        return
    steps = sorted({line["step"] for lines in runs.values() for line in lines})
    rows = [["steps", *(str(step) for step in steps)]]
    longest = max(int(n) for lines in runs.values() for line in lines for n in line["perplexity"])
    for run, lines in runs.items():
        by_step = {line["step"]: line["perplexity"].get(str(longest)) for line in lines}
        rows.append([NAMES.get(run, run), *(_shown(by_step.get(step)) for step in steps)])
    yield _section(
        "Position interpolation against direct fine-tuning",
        filled(
            f"Perplexity at {format_length(longest)} tokens on one book, by step. Section 3.3 of "
            "2306.15595 has this curve for LLaMA."
        ),
        markdown_table(rows),
    )


NAMES = {
    "none": "direct, no extension", "linear": "linear (position interpolation)",
    "control": "control, trained within the old window",
}  # fmt: skip
"""LoRA runs whose rows are not called as the run is."""


def _searched(results: Results) -> Iterator[str]:
    for line in results.of_kind(SEARCH):
        divisors = " ".join(f"{divisor:g}" for divisor in line["divisors"])
        yield _section(
            f"The table of `{line['name']}`",
            filled(
                f"Found by `rope-extend search` with {line['cost']['forward_tokens']:,} forward tokens. "
                f"Attention factor {line['attention_factor']:g}, divisors {divisors}."
            ),
        )


README_ROWS = ("none", "yarn", "dynamic_yarn", "self_extend", "yarn + LoRA")
"""Labels of rows that the README shows, next to the control."""


def in_readme(label: str) -> bool:
    """Whether the README shows a row."""
    return label in README_ROWS or ", cropped to " in label


def readme_table(results: Results) -> str:
    """The table of the README, and what it shows: some rows, from the trained window on."""
    gains = _gains(results)
    rows = [row for row in results.rows if in_readme(row.label)]
    lengths = [length for length in sorted(rows[0].result.ppl) if length >= results.trained]
    lines = [["", *map(format_length, lengths), f"{format_length(lengths[-1])} / cropped"]]
    for row in rows:
        figures = [_shown(row.result.ppl[length]) for length in lengths]
        lines.append([row.label, *figures, _ratio(gains.get(row.label))])
    head = f"Perplexity over the first N tokens of {results.books}, lower is better:"
    parts = [head, markdown_table(lines)]
    for gain in against_trained_control(results.rows):
        if in_readme(gain.second.label):
            parts.append(
                filled(
                    f"`{gain.first.label}` is a control with the same training. At "
                    f"{format_length(lengths[-1])}, `{gain.second.label}` is {by(gain.differences[-1])} it."
                )
            )
    return "\n\n".join(parts)


def _lora_plan() -> str:
    """The length of a LoRA run, from its settings."""
    recipe = Recipe.from_yaml(CONFIGS / "lora.yaml")
    tokens = recipe.length * recipe.batch_size * recipe.gradient_accumulation
    return f"{recipe.steps} steps with {tokens:,} tokens"


def _missing(results: Results) -> Iterator[str]:
    """What the page should have, and has not."""
    said = [filled(text, "- ") for text in (*_measured_in_part(results), *_answered_in_part(results))]
    said += [filled(f"Not measured: {text}", "- ") for text in _not_measured(results)]
    if said:
        yield _section("What is missing", "\n".join(said))


def _measured_in_part(results: Results) -> Iterator[str]:
    """Rows with some books of a target, which no table has."""
    for length in (results.longest, *results.other_targets):
        found = results if length == results.longest else results_of(results.lines, length)
        books = {line["result"]["data"] for line in found.lines_of_target}
        at = "" if length == results.longest else f" at {format_length(length)}"
        for label, count in found.collected.partial.items():
            if 0 < count < len(books):
                yield f"Perplexity of {label}{at}: {books_text(count)} of {len(books)} so far."
        whole, every = len(found.collected.documents), len(results.collected.documents)
        if length > results.longest and whole < every:
            yield f"Perplexity at {format_length(length)}: {books_text(whole)} of {every} so far."


def _planned_prompts() -> dict[tuple[str, int], int]:
    """How many prompts of each task the settings have for a row, by task and length."""
    planned: dict[tuple[str, int], int] = {}
    for stage in OF_PROMPTS:
        config = StudyConfig.from_yaml(CONFIGS / f"{stage}.yaml")
        for task, length in product(config.tasks, config.task_lengths or ()):
            count = len(config.prompt_options.trials_of(TASKS[task]))
            planned[task, length] = max(count, planned.get((task, length), 0))
    return planned


def _answered_in_part(results: Results) -> Iterator[str]:
    """Rows with fewer prompts of a task than the settings or another row have."""
    prompts: dict[tuple[str, int], dict[str, set[Any]]] = {}
    for line in results.of_kind(RETRIEVAL):
        for cell in line["cells"]:
            by_label = prompts.setdefault((cell["task"], cell["length"]), {})
            by_label.setdefault(line["label"], set()).add((cell["depth"], line["trial"]))
    planned = _planned_prompts()
    for (task, length), by_label in prompts.items():
        every = max(*map(len, by_label.values()), planned.get((task, length), 0))
        labels: dict[int, list[str]] = {}
        for label, answered in by_label.items():
            labels.setdefault(len(answered), []).append(f"`{label}`")
        for count, names in labels.items():
            if count < every:
                at = format_length(length)
                yield f"{task} at {at}, {count} of {every} prompts so far: {', '.join(names)}."


def _not_measured(results: Results) -> Iterator[str]:
    """Stages of which there is no line, and prompts that a LoRA run has not answered."""
    measured = results.of_kind(PERPLEXITY)
    runs = {
        line["adapter"]: line["label"]
        for line in sorted(measured, key=lambda line: line["result"]["protocol"] != "cropped")
        if line["adapter"]
    }
    if names := ", ".join(name for run, name in LORA_NAMES.items() if run not in runs):
        yield f"LoRA runs ({names}), of {_lora_plan()} each."
    for stage in ("untrained", "string", "longer"):
        config = StudyConfig.from_yaml(CONFIGS / f"{stage}.yaml")
        length = results.longest if stage == "untrained" else config.target_length
        there = {line["label"] for line in measured if longest_of(line) == length}
        assert config.methods is not None
        if rows := ", ".join(f"`{name}`" for name in config.methods if name not in there):
            assert length is not None
            yield f"{rows} at {format_length(length)}."
    answered: dict[str, set[str]] = {}
    for line in results.of_kind(RETRIEVAL):
        for cell in line["cells"]:
            answered.setdefault(cell["task"], set()).add(line["adapter"] or "")
    if "passkey" not in answered:
        yield "Passkeys."
    if "multi_key" not in answered:
        yield "Tasks in the style of RULER."
    for task, answered_by in answered.items():
        if labels := ", ".join(f"`{label}`" for run, label in runs.items() if run not in answered_by):
            yield f"{task} of {labels}."
    if not results.of_kind(SEARCH):
        yield "A searched table."


LORA_NAMES = {
    "yarn": "`yarn`", "linear": "`linear`", "none": "direct", "ntk": "`ntk`", "race": "the searched table",
    "control": "a control within the old window",
}  # fmt: skip
"""LoRA runs that every page should have."""
