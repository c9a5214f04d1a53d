"""Every command and every block of Python on the README and the pages of `docs/` works as written."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from commands import Commands

import rope_extend as rx
from rope_extend.advice.shipped import shipped_names
from rope_extend.cli.arguments import flag_table
from rope_extend.cli.main import command_parser, parse
from rope_extend.cli.train import recipe_of
from rope_extend.models.families import REFUSED
from rope_extend.training.resume import checkpoints, read_state

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
METHODS = sorted(f"docs/methods/{page.name}" for page in (ROOT / "docs" / "methods").glob("*.md"))
CARD = "rope_extend/demo/README.md"
MOST_WORDS = 1100
HUB_OWNERS = ("meta-llama/", "Qwen/", "HuggingFaceTB/", "owner/")
"""Owners of models on the hub that pages name; their commands need a network."""


class Block(NamedTuple):
    """A fenced block of code on a page."""

    page: str
    language: str
    text: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


BLOCKS = [
    Block(page, language, text)
    for page in [*PAGES, CARD]
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL)
]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def command_lines(block: Block) -> list[list[str]]:
    """The command lines of a block, as words; an inline Python block has none."""
    if block.language != "bash":
        return []
    lines = [line for line in block.text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [shlex.split(line, comments=True) for line in lines]


COMMANDS = [words for block in BLOCKS for words in command_lines(block)]


def arguments(words: list[str]) -> list[str] | None:
    """What `rope-extend` gets: also behind a launcher's `-m rope_extend`."""
    if words[0] == "rope-extend":
        return words[1:]
    return words[words.index("rope_extend") + 1 :] if "rope_extend" in words else None


TEXT = "\n".join(map(read, [*PAGES, *METHODS, CARD, "CONTRIBUTING.md"])).replace("\\\n", " ")
TEXT = TEXT.replace("$start", "current")  # of a loop
LINE = re.compile(
    r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*((?:rope-extend |\w+ .*(?:-m rope_|&& rope-)extend )[^`\n]*)$", re.MULTILINE
)
OURS = sorted({
    tuple(ours)
    for line in LINE.findall(TEXT)
    for command in re.split(r" && ", line)
    if (words := shlex.split(command, comments=True)) and (ours := arguments(words))
})  # fmt: skip
"""The arguments of every command in a block of code, whatever the block's language or indentation."""
SPANS = sorted({tuple(shlex.split(text)) for text in re.findall(r"`rope-extend ([^`\n]+)`", TEXT)})
"""Commands within sentences, which may lack arguments."""


def runs_here(words: list[str]) -> bool:
    """Whether a command needs neither a network, nor text of the user's, nor several processes."""
    recipes = [word for word in words if word.startswith("configs/") and word.endswith(".yaml")]
    models = [str(yaml.safe_load((ROOT / recipe).read_text()).get("model")) for recipe in recipes]
    local = all(model.startswith("rope_extend/") for model in models)
    local &= not any(Path(word).name in shipped_names() or word.startswith(HUB_OWNERS) for word in words)
    ours = words[0] == "rope-extend" or words[1].startswith("scripts/")
    return ours and local and not any(word.startswith("path/to/") for word in words)


def test_the_pages_name_what_exists() -> None:
    for name in rx.encoding_names():
        assert f"| [`{name}`](methods/{name}.md) |" in read("docs/methods.md"), name
    supported = len(rx.supported_families())
    readme = " ".join(read("README.md").split())
    assert f"{supported} of the {supported + len(REFUSED)} families" in readme
    assert f"all {len(rx.encoding_names())}, each with formula" in readme
    assert f"{len(rx.encoding_names())} position encodings" in read("docs/methods.md")
    assert f"lists all {len(shipped_names())}" in readme
    assert len(OURS) >= 10
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {words[1] for words in COMMANDS if words[0] == "make"} <= set(targets)


def test_the_readme_is_short_and_links_every_page() -> None:
    """Details belong to `docs/`."""
    assert len(read("README.md").split()) <= MOST_WORDS
    assert not [page for page in PAGES[1:] if f"({page})" not in read("README.md")]


@pytest.mark.parametrize("page", [*PAGES, *METHODS, "CONTRIBUTING.md", "CHANGELOG.md", CARD])
def test_links_lead_somewhere(page: str) -> None:
    """Each relative link is a file, and each `#section` a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        path, _, section = target.partition("#")
        if "://" in target:
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if section:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert section in slugs, target


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_commands_parse(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory that looks like a clone, with what the commands name."""
    for name in ("rope_extend", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "factors").mkdir()
    shutil.copy(ROOT / "configs/results/searched.json", tmp_path / "factors" / "encoding.json")
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.startswith("./"):
            Path(word).mkdir()
        elif word.endswith(".gguf"):
            Path(word).touch()
        elif word.startswith(("configs/", "rope_extend/")):
            assert Path(word).exists(), word
    parsed = parse(words)
    if words[0] == "finetune" and Path(words[1]).exists():
        recipe_of(parsed)


@pytest.mark.parametrize("words", SPANS, ids=" ".join)
def test_commands_in_sentences_name_flags_that_exist(words: tuple[str, ...]) -> None:
    flags = flag_table(command_parser(words[0])).values()
    assert {word for word in words[1:] if word.startswith("--")} <= {"--help", "--help-all", *flags}


def test_parts_of_scripts_are_in_a_script() -> None:
    """`py` marks a part of a script, without its indentation; `python` a block that runs by itself."""

    def flat(text: str) -> str:
        return "".join(f"{line.strip()}\n" for line in text.splitlines())

    scripts = "".join(flat(read(f"scripts/{path.name}")) for path in (ROOT / "scripts").glob("*.py"))
    parts = [flat(block.text) for block in BLOCKS if block.language == "py"]
    assert parts
    assert not [part for part in parts if part not in scripts]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.page)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec")


SHORTER = {
    "finetune": ("--steps", "2", "--eval-documents", "2"),
    "evaluate": ("--documents", "2"),
    "retrieve": ("--trials", "1"),
    "scripts/finetune.py": ("--steps", "2"),  # test_scripts.py takes them all
    "scripts/evaluate.py": ("--documents", "2"),
}
"""What is added to commands: two steps and two texts show whether one works. The demonstration takes all
steps of the same two recipes, and measures them on eight texts."""


@pytest.mark.slow
def test_everything_runs_as_written(tmp_path: Path, commands: Commands) -> None:
    """In a directory that looks like a clone: first the README, then each page of `docs/`."""
    for name in ("rope_extend", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in BLOCKS:
        for words in filter(runs_here, command_lines(block)):
            commands.run(*words[1:], *SHORTER.get(words[1], ()), where=tmp_path)
        if block.language == "python":
            commands.run("-c", block.text, where=tmp_path)
    assert (tmp_path / "runs" / "report" / "perplexity.png").exists()
    assert (tmp_path / "runs" / "adapter-ppl" / "perplexity.svg").exists()
    assert read_state(checkpoints(tmp_path / "runs" / "mixed" / "checkpoints")[-1]).step == 2
