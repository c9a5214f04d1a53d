"""Make docs/results.md: a real model's numbers, measured on this machine.

    python scripts/make_results.py --data books/validation --training-data books/train
    python scripts/make_results.py --quick --data books/     # a smaller table
    python scripts/make_results.py --page                    # the page again, from existing results

It can be stopped at any time, and the same command continues: each row and book, and each row and prompt, is
kept when it is measured. A new clone continues too: lines of `docs/results/results.jsonl` that have the same
weights, texts and settings are not measured again. `--share 1/2` and `--share 2/2` divide the measurements
between two processes.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from page_parts import with_part
from results_lines import Line, is_measured_line, lines_of, read_lines, write_lines
from results_page import CONFIGS, OF_PROMPTS, in_readme, page, readme_table
from results_recorded import (
    check_model,
    is_measured,
    is_searched,
    is_trained,
    merged,
    plain_cells,
    restore,
    restore_table,
)
from results_rows import Results, results_of
from rope_extend.study.cells import Cell, CellStore
from rope_extend.study.run_study import Share, Study
from script_run import run
from smollm2 import MODEL, SOURCE, checkpoint

from rope_extend.checkpoint.info import info
from rope_extend.data.sources import is_dataset, source_files
from rope_extend.demo.run import finetune_once
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.identity import read_identity
from rope_extend.files import sha256, write_json, write_text
from rope_extend.journal import check_same
from rope_extend.method_names import ENCODING_FILE
from rope_extend.plots.curves import plot_perplexity, plot_ratio
from rope_extend.searching.run_search import search
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.search_log import LOG
from rope_extend.study.study_config import StudyConfig
from rope_extend.training.recipe import Recipe
from rope_extend.units import format_duration, format_length

ROOT = Path(__file__).parent.parent
SETTINGS = "settings.json"
CONTROL, RACE = "control", "race"
LORA_RUNS = {"lora": ("yarn", "linear", "none"), "more_lora": ("ntk", CONTROL, RACE)}
"""The LoRA runs of each stage. `none` is direct fine-tuning without an extension, `control` has the same
training within the old window, and `race` the searched table; the others are named by their method."""
BEGIN, END = "<!-- make results: begin -->", "<!-- make results: end -->"
"""Marks around the table in the README."""

QUICK: dict[str, Any] = {
    "max_documents": 1, "lengths": ["4k", "8k", "12k"], "target_length": "12k", "task_lengths": ["12k"],
    "depths": 3, "trials": 1,
}  # fmt: skip
"""What `--quick` changes in every study."""
ON_A_GPU: dict[str, Any] = {
    "lengths": ["2k", "4k", "8k", "12k", "16k", "24k", "32k"], "target_length": "32k", "trials": 10,
}  # fmt: skip
"""What a GPU changes in every study: longer windows, and more prompts."""
FIXED = ("precision", "string", "longer")
"""Stages whose lengths neither `--quick` nor a GPU changes."""


@dataclass(frozen=True)
class Run:
    """Where everything of one run is, and what it measures.

    Attributes:
        directory: cells, LoRA runs and searches.
        model: directory of the checkpoint.
        data: long documents to measure on.
        training_data: other long documents, to train and search on; None to leave these stages out.
        changes: fields of every study that differ from the YAML files.
        share: which part of the cells this process measures.
        recorded: lines of the page, which count as measured if they are of the same model, text and settings.
        stages: the stages of this run, in order.
    """

    directory: Path
    model: str
    data: Sequence[str]
    training_data: Sequence[str] | None
    changes: dict[str, Any]
    share: Share
    recorded: Sequence[Line] = ()
    stages: Sequence[str] = ()

    def config(self, name: str, **changes: Any) -> StudyConfig:
        """The settings of the study of a stage."""
        data = None if name in OF_PROMPTS else list(self.data)
        values = {"model": self.model, "data": data, **self.changes, **changes}
        return StudyConfig.from_yaml(CONFIGS / f"{name}.yaml", values)

    def study(self, name: str, **changes: Any) -> None:
        """Measure what is missing of a stage."""
        study = Study(self.config(name, **changes))
        store = CellStore(self.directory)
        study.run(
            self.directory, share=self.share, before=lambda cells: _say(restore(self.recorded, cells, store))
        )

    @property
    def race(self) -> Path:
        """Directory of the search."""
        return self.directory / RACE

    def recipe(self, name: str) -> Recipe:
        """The recipe of a LoRA run."""
        changes: dict[str, Any] = {
            "model": self.model, "data": list(self.training_data or ()), "eval_data": list(self.data),
            "output_dir": str(self.directory / "lora" / name), "method": name,
        }  # fmt: skip
        if (target := self.changes.get("target_length")) is not None:
            lengths = Recipe.from_yaml(CONFIGS / "lora.yaml").eval_lengths
            changes |= {"target_length": target, "eval_lengths": [*lengths[:-1], target]}
        if name == CONTROL:
            changes |= {"method": "none", "target_length": info(self.model).shape.trained_length}
        elif name == RACE:
            changes["method"] = str(self.race)
        return Recipe.from_yaml(CONFIGS / "lora.yaml", changes)

    def measured_later(self, stage: str, lora_run: str) -> list[Cell]:
        """What an adapter is measured on from a stage of this run on, as cells of plain RoPE."""
        later = self.stages[self.stages.index(stage) :]
        names = ["trained", *(name for name in later if name in OF_PROMPTS)]
        configs = [self.config(name, methods=["none"]) for name in names]
        cropped = [replace(config, cropped=config.cropped and lora_run == CONTROL) for config in configs]
        return [cell for config in cropped for cell in plain_cells(config)]

    def train(self, stage: str) -> None:
        """Train what is missing of the LoRA runs of a stage; the first share does it.

        A run counts as finished if the page has its last step, and a line for all that it is measured on.
        """
        if self.training_data is None or self.share.index:
            return
        for name in LORA_RUNS[stage]:
            if name == RACE and not (self.race / ENCODING_FILE).exists():
                print(f"LoRA, {name}: no table was searched in this directory", flush=True)
                continue
            recipe = self.recipe(name)
            there = Path(recipe.output_dir).exists()
            if (
                not there
                and is_trained(self.recorded, name, recipe)
                and is_measured(self.recorded, self.measured_later(stage, name), run=name)
            ):
                print(f"LoRA, {name}: its lines are on the page; delete them to train it again", flush=True)
            else:
                finetune_once(recipe)

    def adapters(self) -> list[str]:
        """The finished LoRA runs."""
        found = (self.directory / "lora" / name for names in LORA_RUNS.values() for name in names)
        return [str(path) for path in found if (path / "adapter_config.json").exists()]

    def trained(self) -> None:
        """Measure the finished LoRA runs."""
        if self.adapters():
            self.study("trained", adapters=self.adapters())

    def searched(self) -> None:
        """Search a table, which the first share does, and measure it.

        The search counts as finished if the page has its result. Then the table is that of the page.
        """
        if self.training_data is None:
            return
        changes = {"model": self.model, "data": list(self.training_data), "output": str(self.race)}
        if (target := self.changes.get("target_length")) is not None:
            changes["target_length"] = target
        config = SearchConfig.from_yaml(CONFIGS / "race.yaml", changes)
        if (
            not self.race.exists()
            and is_searched(self.recorded, RACE, config)
            and restore_table(self.recorded, self.race, config.target_length)
        ):
            print("search: its table is that of the page; delete its lines to search again", flush=True)
        if not (self.race / ENCODING_FILE).exists():
            if self.share.index:
                print(
                    "search: the first share does it; repeat this command after it to measure the table",
                    flush=True,
                )
                return
            search(config, resume=(self.race / LOG).exists())
        self.study("searched", methods=["none", str(self.race)])

    def stage(self, name: str) -> None:
        """One of `STAGES`."""
        if name in LORA_RUNS:
            self.train(name)
            self.trained()
        elif name in OF_PROMPTS:
            self.study(name, adapters=self.adapters())
        elif name in FIXED:
            fixed = StudyConfig.from_yaml(CONFIGS / f"{name}.yaml")
            changes: dict[str, Any] = {"lengths": fixed.lengths, "target_length": fixed.target_length}
            for dtype in ("float32", "bfloat16") if name == "precision" else ("bfloat16",):
                self.study(name, **changes, task_lengths=None, dtype=dtype)
        elif name == "searched":
            self.searched()
        else:
            self.study(name)


STAGES = (
    "untrained", "precision", "lora", "passkeys", "string", "searched", "more_lora", "tasks", "longer",
)  # fmt: skip
"""All stages, the most important first; prompts of two lengths and three tasks take longest."""
ON_A_CPU = ("longer",)
"""Stages that a GPU leaves out: there `untrained` has these lengths."""
QUICK_STAGES = ("untrained", "passkeys")
"""The stages of `--quick`."""


def _say(restored: int) -> None:
    """Print how many cells were taken from the page."""
    if restored:
        print(f"{restored} cells are those of the page", flush=True)


def fingerprint(files: Iterable[Path]) -> str:
    """Sixteen hexadecimal digits for the contents of files, in any order."""
    digests = sorted(sha256(path) for path in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def settings_of(model: str, data: Sequence[str], changes: dict[str, Any]) -> dict[str, Any]:
    """What a run measures: the contents of the weights and of the texts on disk, and the names of others."""
    path, datasets = Path(model), [source for source in data if is_dataset(source)]
    files = [path] if path.is_file() else path.glob("*")
    weights = [file for file in files if file.suffix in (".safetensors", ".gguf")]
    texts = source_files([source for source in data if source not in datasets])
    return {
        "changes": changes,
        "weights": fingerprint(weights) if weights else model,
        "texts": fingerprint(texts),
        "datasets": datasets,
    }


def check_settings(directory: Path, settings: dict[str, Any]) -> None:
    """Refuse to mix two runs in one directory.

    Settings of an earlier version, without some of today's values, get those of now. `results_of` refuses
    cells of other weights in any case.

    Raises:
        RopeExtendError: the directory belongs to a run with other settings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / SETTINGS
    stored = read_identity(file) if file.exists() else {}
    if isinstance(stored, dict):
        stored = {name: stored.get(name, value) for name, value in settings.items()}
    check_same(
        stored, settings, what=f"{str(directory)!r} holds results",
        advice="use the same arguments, or another --run directory",
    )  # fmt: skip
    write_json(file, settings)


def write(lines: Sequence[Line], docs: Path) -> None:
    """Write the lines, and as soon as one is measured, the page and its pictures."""
    results = results_of(lines)
    write_lines(lines, docs / "results" / "results.jsonl")
    if not any(map(is_measured_line, lines)):
        print("nothing is measured yet, so there is no page: run another stage", flush=True)
        return
    write_text(docs / "results.md", page(results, source_of(results)))
    readme = ROOT / "README.md"  # of the project alone, whose first lines name the model
    is_ours = docs.resolve() == (ROOT / "docs").resolve()
    if is_ours and results.rows and results.longest >= results.trained and readme.exists():
        write_text(readme, with_table(readme.read_text(encoding="utf-8"), readme_table(results)))
    for suffix in ("png", "svg") if results.rows else ():
        draw(results, docs / "results" / f"perplexity.{suffix}")
        if results.near:
            plot_ratio(results.near, docs / "results" / f"ratio.{suffix}")


def source_of(results: Results) -> str:
    """The model of the lines, and where it is from if it is the one that is downloaded."""
    return SOURCE if results.model == MODEL else results.model


def draw(results: Results, path: Path) -> None:
    """Draw the perplexity of the rows of the README, by length."""
    rows = [row for row in results.rows if in_readme(row.label) or row.label == "linear"]
    title = f"{results.model} beyond its window of {format_length(results.trained)}"
    plot_perplexity(rows, results.trained, path, title=title)


def with_table(text: str, table: str) -> str:
    """The README with the table between its two marks; without marks it stays as it is."""
    return with_part(text, table, BEGIN, END)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument(
        "--data", action="append", help="long documents to measure on; may be given several times"
    )
    made.add_argument(
        "--training-data", action="append", help="other long documents, for LoRA and the search"
    )
    made.add_argument("--model", help="checkpoint to use instead of the downloaded one")
    made.add_argument("--run", type=Path, default=Path("runs/results"), help="directory of the measurements")
    made.add_argument(
        "--docs", type=Path, help="directory of results.md (default: docs/; with --quick, docs/ of the run)"
    )
    made.add_argument("--quick", action="store_true", help="one document, 12k tokens, fewer prompts")
    made.add_argument("--stages", help=f"stages, separated by commas: {','.join(STAGES)} (default: all)")
    made.add_argument("--share", default="1/1", help="part of the measurements, such as 1/2 and 2/2")
    made.add_argument("--page", action="store_true", help="only write the page, from existing results")
    return made


def share_of(text: str) -> Share:
    """`1/2` is the first of two.

    Raises:
        RopeExtendError: anything else than two numbers, the first at most the second.
    """
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise RopeExtendError(f"--share is a part such as 1/2, got {text!r}")
    return Share(int(first) - 1, int(count))


def main(words: list[str] | None = None) -> None:
    """Read the command line, and check it and what it would continue."""
    arguments = parser().parse_args(words)
    docs = arguments.docs or (arguments.run if arguments.quick else ROOT) / "docs"
    file = docs / "results" / "results.jsonl"
    recorded = read_lines(file)
    if arguments.page:
        found = merged(lines_of(arguments.run), recorded)
        if not any(map(is_measured_line, found)):
            raise RopeExtendError(
                f"there are no results in {str(arguments.run)!r} or {str(file)!r} to make a page of; measure "
                "first, without --page"
            )
        write(found, docs)
        return
    if not arguments.data:
        raise RopeExtendError(
            "give long documents to measure on: --data DIRECTORY, such as a folder of books"
        )
    on_a_gpu = torch.cuda.is_available() and not arguments.quick
    stages = QUICK_STAGES if arguments.quick else STAGES
    if on_a_gpu:
        stages = tuple(name for name in STAGES if name not in ON_A_CPU)
    if arguments.stages is not None:
        stages = tuple(arguments.stages.split(","))
    if unknown := [name for name in stages if name not in STAGES]:
        raise RopeExtendError(f"no stage {', '.join(unknown)}; stages are {', '.join(STAGES)}")
    share = share_of(arguments.share)
    changes = QUICK if arguments.quick else ON_A_GPU if on_a_gpu else {}
    model = arguments.model or str(checkpoint(arguments.run / "model"))
    check_model(recorded, model, file)
    check_settings(arguments.run, settings_of(model, arguments.data, changes))
    run = Run(arguments.run, model, arguments.data, arguments.training_data, changes, share, recorded, stages)
    try:
        with FileLock(arguments.run / f"share-{share.index + 1}.lock", timeout=0):
            measure(run, docs)
    except Timeout as error:
        raise RopeExtendError(
            f"another process measures in {str(arguments.run)!r} with --share {share.index + 1}/..; wait for "
            "it, or give each process a share of its own, such as 1/2 and 2/2"
        ) from error


def measure(run: Run, docs: Path) -> None:
    """Measure what is missing, stage by stage, and write the page after each stage."""
    for number, stage in enumerate(run.stages, start=1):
        started = time.perf_counter()
        print(f"\n[{number}/{len(run.stages)}] {stage}", flush=True)
        run.stage(stage)
        recorded = read_lines(docs / "results" / "results.jsonl")  # others may have written since
        write(merged(lines_of(run.directory), recorded), docs)
        took = format_duration(time.perf_counter() - started)
        print(f"{stage}: {took}; written: {docs}", flush=True)


if __name__ == "__main__":
    run(main, "rope_extend.study", "rope_extend.training", "rope_extend.searching")
