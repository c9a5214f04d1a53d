"""The documentation as a site: mkdocs finds every page in its menu, and its links lead somewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import site_pages
import yaml

import rope_extend as rx
from rope_extend.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


class _Config(yaml.SafeLoader):
    """Reads mkdocs.yml, with the name of a Python function as text."""


_Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Config)


def menu(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for part in entries for page in menu(part)]  # type: ignore[attr-defined]


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


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """mkdocs itself fails for a link or an anchor that leads nowhere. Nothing is loaded from the network."""
    pytest.importorskip("mkdocs", reason="make docs installs it")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    assert CONFIG["strict"]
    assert set(CONFIG["validation"]["links"].values()) == {"warn"}  # which strict makes an error
    shutil.copytree(ROOT / "docs", tmp_path / "docs")  # others may be writing there
    made = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(tmp_path / "docs"), site_dir=str(made)))
    texts = {
        path.relative_to(made).as_posix(): path.read_text(encoding="utf-8") for path in made.rglob("*.html")
    }
    assert {str(Path(name).with_suffix(".html")) for name in menu(CONFIG["nav"])} <= set(texts)
    loaded = r"""<(?:img|script|iframe)[^>]*\ssrc="?https?:|<link(?![^>]*canonical)[^>]*\shref="?https?:"""
    assert not [name for name, text in texts.items() if re.search(loaded, text)]
    assert (made / "search" / "search_index.js").is_file()  # so that the search works from disk
    assert all('src="../iframe-worker.js"' in texts[f"methods/{name}.html"] for name in rx.encoding_names())
    formulas = [name for name, text in texts.items() if "<math" in text]
    assert {f"methods/{name}.html" for name in rx.encoding_names()} == set(formulas)
    assert "<merror" not in "".join(texts.values())
    assert "rx.NAME" in (made / "api.html").read_text(encoding="utf-8")
