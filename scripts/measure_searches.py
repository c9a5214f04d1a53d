"""Measure docs/search.md: searched tables next to closed forms, before and after the same LoRA run.

    python scripts/measure_searches.py configs/search/demo_2k.yaml
    python scripts/measure_searches.py configs/search/stories260K_2k.yaml --model stories260K \
        --data books/train --evaluation-data books/validation --tasks none
    python scripts/measure_searches.py --page        # the page again, from existing results

Each strategy searches. Then each table is measured without training, and trained with the recipe of the
demonstration. It takes hours, can be stopped at any time, and the same command continues.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from page_parts import with_part
from results_lines import lines_of, read_lines, write_lines
from rope_extend.study.run_study import Study
from script_run import run
from search_page import draw, section

from rope_extend.demo.run import RECIPE, finetune_once
from rope_extend.encodings import RopeShape
from rope_extend.encodings.core.critical import critical_range
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import file_name
from rope_extend.files import write_text
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.view import shape_of
from rope_extend.searching.run_search import search
from rope_extend.searching.search_config import GENETIC, RACE, SearchConfig
from rope_extend.searching.search_log import LOG
from rope_extend.searching.search_result import SUMMARY
from rope_extend.study.study_config import StudyConfig
from rope_extend.training.recipe import Recipe

ROOT = Path(__file__).parent.parent
PAGE, FOLDER = ROOT / "docs" / "search.md", ROOT / "docs" / "search"
BEGIN, END = "<!-- measure_searches: begin -->", "<!-- measure_searches: end -->"
"""Marks around what this script writes."""
SEARCHES = (RACE, GENETIC)
CLOSED_FORMS = ("none", "linear", "ntk", "dynamic_ntk", "yarn")
DOCUMENTS, TRIALS = 24, 4
"""Documents of the perplexity, and passkeys at each of 5 depths."""


@dataclass(frozen=True)
class Setting:
    """One model and target.

    Attributes:
        name: names its files.
        directory: searches, LoRA runs and cells.
        search: the settings of the searches, of any strategy.
        evaluation_data: documents that were neither searched nor trained on.
        tasks: retrieval tasks.
    """

    name: str
    directory: Path
    search: SearchConfig
    evaluation_data: str
    tasks: str

    def searches(self) -> list[str]:
        """Search with each strategy what is missing; the directories."""
        found = []
        for strategy in SEARCHES:
            output = self.directory / strategy
            values = {**self.search.to_dict(), "strategy": strategy, "output": str(output)}
            if not (output / SUMMARY).exists():
                print(f"\n{self.name}: search, {strategy}", flush=True)
                search(SearchConfig.from_dict(values), resume=(output / LOG).exists())
            found.append(str(output))
        return found

    def shape(self) -> RopeShape:
        """The rotary shape of the model."""
        return shape_of(LoadOptions(device="cpu").empty(self.search.model), self.search.trained_length)

    def closed_forms(self) -> list[str]:
        """Closed forms, also with the critical pair where LongRoPE2 begins to look for it."""
        first, _ = critical_range(self.shape())
        return [*CLOSED_FORMS, f"ntk(critical={first})", f"yarn(critical={first})"]

    def train(self, method: str) -> str:
        """Train what is missing of a LoRA run with a method; its directory."""
        output = self.directory / "lora" / file_name(Path(method).name)
        changes = {
            "model": self.search.model, "target_length": self.search.target_length, "method": method,
            "output_dir": str(output),
        }  # fmt: skip
        if self.search.data is not None:
            changes["data"] = self.search.data
        print(f"\n{self.name}: LoRA, {Path(method).name}", flush=True)
        finetune_once(Recipe.from_yaml(RECIPE, changes))
        return str(output)

    def measure(self, methods: list[str], adapters: list[str]) -> None:
        """Measure what is missing of the perplexity and the passkeys of these rows."""
        target = self.search.target_length
        trained = self.shape().trained_length
        lengths = sorted(trained << power for power in range(8) if trained << power <= target)
        config = StudyConfig(
            model=self.search.model, target_length=target, data=self.evaluation_data,
            max_documents=DOCUMENTS, methods=tuple(methods), adapters=tuple(adapters), tasks=self.tasks,
            trials=TRIALS, lengths=tuple(lengths),
        )  # fmt: skip
        Study(config).run(self.directory)
        write_lines(lines_of(self.directory), FOLDER / f"{self.name}.jsonl")

    def run(self) -> None:
        """Everything, in order: tables are measured before they are trained."""
        methods = [*self.closed_forms(), *self.searches()]
        self.measure(methods, [])
        self.measure(methods, [self.train(method) for method in methods])


def write_page() -> None:
    """Write what was measured into the page."""
    text = PAGE.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise RopeExtendError(f"{PAGE.name} has lost the marks {BEGIN} and {END}; put them where tables go")
    found = {file.stem: read_lines(file) for file in sorted(FOLDER.glob("*.jsonl"))}
    for name, lines in found.items():
        draw(name, lines, FOLDER)
    parts = [section(name, lines) for name, lines in found.items()]
    write_text(PAGE, with_part(text, "\n" + "\n".join(parts), BEGIN, END))


def main() -> None:
    """Measure what is missing of a setting, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="settings of the searches")
    parser.add_argument("--model", help="checkpoint to use instead of that of the file")
    parser.add_argument("--data", help="documents to search and train on, instead of those of the file")
    parser.add_argument("--evaluation-data", default="demo:evaluation", help="other documents, to measure on")
    parser.add_argument("--tasks", default="passkey", help="retrieval tasks; none for no tasks")
    parser.add_argument("--run", type=Path, help="directory of the measurements (default: runs/search/NAME)")
    parser.add_argument("--page", action="store_true", help="only write the page, from existing results")
    given = parser.parse_args()
    if given.config is None and not given.page:
        raise RopeExtendError("give the settings of the searches, such as configs/search/demo_2k.yaml")
    if given.config is not None:
        changes = {name: value for name in ("model", "data") if (value := getattr(given, name))}
        config = SearchConfig.from_yaml(given.config, changes)
        name = given.config.stem
        directory = given.run or Path("runs") / "search" / name
        Setting(name, directory, config, given.evaluation_data, given.tasks).run()
    write_page()


if __name__ == "__main__":
    run(main, "rope_extend.study", "rope_extend.searching")
