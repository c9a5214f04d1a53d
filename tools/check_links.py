"""Open every external link of the pages, and print those that do not answer. Needs a network; not in CI.

    python tools/check_links.py            # README, docs and the other pages
    python tools/check_links.py --list     # only print the links, without opening them

Exits with 1 if a link is wrong. The links' form is checked by tests/front/test_links.py.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT = 20
"""Seconds to wait for an answer."""


def pages() -> list[Path]:
    """The files whose links are checked."""
    tops = [*ROOT.glob("*.md"), ROOT / "CITATION.cff", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    folders = [
        page for folder in ("docs", "rope_extend", "benchmarks") for page in (ROOT / folder).rglob("*.md")
    ]
    return sorted({*tops, *folders})


def links(files: list[Path]) -> dict[str, list[str]]:
    """The files that name each external link, by the link."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        for url in re.findall(r"https?://[^\s<>\"'`)\]]+", file.read_text(encoding="utf-8")):
            name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
            if name not in found[url := url.rstrip(".,;:")]:
                found[url].append(name)
    return dict(sorted(found.items()))


def answer(url: str) -> str:
    """What is wrong with a link, or an empty text if it opens."""
    request = urllib.request.Request(url, headers={"User-Agent": "rope_extend link check"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as opened:
            return "" if opened.status == 200 else f"status {opened.status}"
    except urllib.error.HTTPError as error:
        # Some hosts refuse programs. Then a person must look.
        return f"status {error.code}" + (" (refuses programs; open it yourself)" if error.code == 403 else "")
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the links without opening them")
    every = links(pages())
    if parser.parse_args().list:
        print("\n".join(every))
        sys.exit(0)
    wrong = 0
    for url, names in every.items():
        problem = answer(url)
        wrong += bool(problem)
        print(f"WRONG {url}: {problem}; in {', '.join(names)}" if problem else f"ok    {url}", flush=True)
    print(f"\n{wrong} of {len(every)} links are wrong")
    sys.exit(wrong > 0)
