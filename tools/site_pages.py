"""A hook of mkdocs: pages of the site that are not in `docs/`, and links that differ on the site.

The README is the first page. The pages on the Python interface and on the command line come from docstrings
and from `--help`, so they cannot be out of date.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from site_measured import measured

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository, outside `docs/`, and their names on the site."""
ROOMS = {
    "patching": "Extend a model",
    "advice": "Advice",
    "data": "Documents",
    "training": "Fine-tuning",
    "searching": "Search",
    "evaluation": "Evaluation",
    "checkpoint": "Checkpoints",
    "models": "Models",
    "encodings": "Encodings",
}
"""The rooms of the package in the order of the page on the Python interface, with headings; others follow."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in `docs/`."""
    from mkdocs.structure.files import File

    made = {name: (ROOT / source).read_text(encoding="utf-8") for source, name in PAGES.items()}
    made |= {"api.md": api_page(), "commands.md": commands_page()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt a page that is written for the repository."""
    sources = {name: source for source, name in PAGES.items()}
    path = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder, name = posixpath.split(page.file.src_uri)
    if folder == "methods":
        markdown = markdown.replace("<!-- measured -->", measured(posixpath.splitext(name)[0]))
    return with_formulas(nested_lists(site_links(markdown, path)))


def site_links(text: str, path: str) -> str:
    """The links of a page as they are on the site.

    Links to pages become links between pages of the site. Links to other files of the repository, which the
    site does not have, become plain text.

    Args:
        text: a Markdown page.
        path: the page's path in the repository.
    """

    def link(match: re.Match[str]) -> str:
        mark, words, target = match["mark"], match["words"], match["target"]
        file, hash_mark, section = target.partition("#")
        if "://" in target or not file:
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        site = PAGES.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if site is None:
            return words
        here = posixpath.dirname(path.removeprefix("docs/")) if path.startswith("docs/") else ""
        return f"{mark}[{words}]({posixpath.relpath(site, here or '.')}{hash_mark}{section})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    pattern = re.compile(r"(?P<mark>!?)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")
    return "".join(part if index % 2 else pattern.sub(link, part) for index, part in enumerate(parts))


def nested_lists(text: str) -> str:
    """Lists inside lists with four spaces for each level, which Python-Markdown needs instead of two."""
    return re.sub(
        r"^(?P<spaces>(?:  )+)(?=[-*] )", lambda match: 2 * match["spaces"], text, flags=re.MULTILINE
    )


def with_formulas(text: str) -> str:
    """A Markdown page with its blocks of `math`, which hold LaTeX, as MathML, which browsers draw themselves.

    In formulas, a hat marks what a method changes: without a font for formulas, a prime is too small to see.
    """
    return re.sub(
        r"^```math\n(?P<latex>.*?)^```$", lambda match: formula(match["latex"]), text,
        flags=re.MULTILINE | re.DOTALL,
    )  # fmt: skip


def formula(latex: str) -> str:
    """One formula in LaTeX as a block of HTML."""
    from latex2mathml.converter import convert

    made = convert(" ".join(latex.split()), display="block")
    thin = '<mspace width="0.17em"/>'  # TeX puts it next to the name of a function
    made = re.sub(r"(<mi>(?:ln|sin|cos)</mi>)(?=<m[a-z]+>(?!<mo ))", rf"\1{thin}", made)
    made = re.sub(r"(?<=</m[in]>)(?=<mi>(?:ln|sin|cos)<)", thin, made)
    return f'<div class="formula">{made}</div>'


def api_page() -> str:
    """The page on the Python interface: every public name, by room, from its docstring."""
    import rope_extend as rx

    rooms: defaultdict[str, list[str]] = defaultdict(list)
    for name in rx.__all__:
        module = rx._MODULE_OF.get(name)
        if module is not None:
            rooms[module.split(".")[1]].append(f"{module}.{name}")
    parts = [
        "# Python interface",
        "`import rope_extend as rx` offers every name on this page as `rx.NAME`. Names are loaded when they "
        "are first used.",
    ]
    for room in sorted(
        rooms, key=lambda room: (list(ROOMS).index(room) if room in ROOMS else len(ROOMS), room)
    ):
        heading = ROOMS.get(room, room.replace("_", " ").capitalize())
        parts += [
            f"## {heading}",
            *(f"::: {name}\n    options:\n      heading_level: 3" for name in rooms[room]),
        ]
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """The page on the command line: the help of every command."""
    from rope_extend.cli.main import COMMANDS, GROUPS, command_parser

    parts = ["# Command line", "`rope-extend COMMAND --help-all` prints the same."]
    for title, commands in GROUPS.items():
        parts.append(f"## {title.capitalize()}")
        for name in (name for name, command in COMMANDS.items() if command in commands):
            parts += [f"### {name}", f"```text\n{command_parser(name).format_help().rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"
