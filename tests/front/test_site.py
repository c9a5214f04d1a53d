"""The documentation as a site: every page is in its menu, and its links lead somewhere."""

from __future__ import annotations

import posixpath
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import site_pages
import yaml

import rope_extend as rx
from rope_extend.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
GENERATED = {*site_pages.PAGES.values(), "api.md", "commands.md"}


class _Config(yaml.SafeLoader):
    """Reads mkdocs.yml, with the name of a Python function as text."""


_Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Config)


def menu(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for part in entries for page in menu(part)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_menu_once() -> None:
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} | GENERATED
    listed = menu(CONFIG["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == pages


def test_links_are_those_of_the_site() -> None:
    text = (
        "[a](choose.md#is-it-for-you) [b](../README.md) ![c](gallery/alibi.png) [d](https://a.b/c) "
        "[e](../configs/demo.yaml) [f](#here)\n```bash\n[g](../README.md)\n```\n"
    )
    assert site_pages.site_links(text, "docs/faq.md") == (
        "[a](choose.md#is-it-for-you) [b](index.md) ![c](gallery/alibi.png) [d](https://a.b/c) "
        "e [f](#here)\n```bash\n[g](../README.md)\n```\n"
    )
    assert site_pages.site_links(
        "![a](pictures/yarn.svg) [b](../saving.md) [c](linear.md#formula)", "docs/methods/yarn.md"
    ) == ("![a](pictures/yarn.svg) [b](../saving.md) [c](linear.md#formula)")
    assert site_pages.site_links("[a](docs/choose.md), [b](CONTRIBUTING.md)", "README.md") == (
        "[a](choose.md), [b](contributing.md)"
    )


def test_the_reference_has_every_name_and_every_command() -> None:
    page = site_pages.api_page()
    named = re.findall(r"^::: rope_extend\.[\w.]+\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(set(rx.__all__) - {"__version__"})
    commands = site_pages.commands_page()
    assert re.findall(r"^### (\S+)$", commands, re.MULTILINE) == list(COMMANDS)
    assert commands.count("examples:") == len(COMMANDS)


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors |= {name for name in (values.get("id"), values.get("name")) if name}
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag in ("img", "script", "iframe") and values.get("src"):
            self.loaded.append(str(values["src"]))
        if tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(str(values.get("href", "")))


@pytest.mark.slow
def test_the_site_is_built_strictly_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """Links, anchors, pictures, styles and scripts; and nothing is loaded from the network."""
    pytest.importorskip("mkdocs", reason="make docs installs it")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    shutil.copytree(ROOT / "docs", tmp_path / "docs")  # others may be writing there
    made = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(tmp_path / "docs"), site_dir=str(made)))
    texts = {
        path.relative_to(made).as_posix(): path.read_text(encoding="utf-8") for path in made.rglob("*.html")
    }
    pages = {name: Page(text) for name, text in texts.items()}
    assert {str(Path(name).with_suffix(".html")) for name in menu(CONFIG["nav"])} <= set(pages)
    broken = []
    for name, page in pages.items():
        if name == "404.html":
            continue
        for target in page.links + page.loaded:
            url = urlsplit(target)
            if url.scheme:
                broken += [(name, target)] if target in page.loaded and url.scheme != "data" else []
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(url.path)))
            path = path if url.path else name
            if not (made / path).exists() or (path in pages and url.fragment not in pages[path].anchors):
                broken.append((name, target))
    assert not broken
    formulas = [name for name, text in texts.items() if "<math" in text]
    assert {f"methods/{name}.html" for name in rx.encoding_names()} == set(formulas)
    assert "<merror" not in "".join(texts.values())
    assert "rx.NAME" in (made / "api.html").read_text(encoding="utf-8")
