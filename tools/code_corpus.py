"""Source code as long documents, one a package: text in which distance matters, because names refer back.

    python tools/code_corpus.py configs/results/code_corpus.yaml --output corpus/

Downloads each package of the list with pip, checks its digest, and writes `validation/NAME.txt` or
`train/NAME.txt`: its Python files in the order of their paths, each below a line with its path. Files whose
path or first lines say that they are tests, vendored copies or generated are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml

from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.files import check_creatable, expand_home, sha256

LEFT_OUT = re.compile(
    r"(^|/)(tests?/|testing/|test_[^/]*$|conftest\.py$|_?vendor(ed)?/|third_?party/|externals?/|\.|[^/]*\.data/)"
)
GENERATED = re.compile(
    r"auto-?generated|^(#.*|\W*)generated (by|from|automatically)|do not (edit|modify)|vendored from",
    re.IGNORECASE | re.MULTILINE,
)
LONGEST = 200_000
"""Characters of a file above which it is data: tables of characters, grammars and the like."""


def document(wheel: Path) -> str:
    """The Python files of a package as one text."""
    parts = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".py") or LEFT_OUT.search(name):
                continue
            text = archive.read(name).decode("utf-8", "replace").strip()
            if text and len(text) <= LONGEST and not GENERATED.search(text[:600]):
                parts.append(f"# {name}\n{text}\n")
    return "\n".join(parts)


def download(requirement: str, digest: str) -> str:
    """The document of a package of the Python index.

    Raises:
        RopeExtendError: pip cannot download it, or it is not the file that the list names.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        command += ["--only-binary=:all:", "--platform=any", "--python-version=3.11"]  # the same everywhere
        if subprocess.run([*command, requirement], check=False).returncode:
            raise RopeExtendError(f"pip could not download {requirement}; see its message")
        (wheel,) = Path(folder).iterdir()
        found = sha256(wheel)
        refuse_if(
            found != digest,
            f"{wheel.name} has the digest {found}, and the list says {digest}; correct the list",
        )
        return document(wheel)


def write(listed: Path, output: Path) -> None:
    """Write the documents of a list of packages.

    Raises:
        RopeExtendError: it is no such list, the output cannot be made, or a package cannot be downloaded.
    """
    try:
        parts = yaml.safe_load(listed.read_text(encoding="utf-8"))
        packages = [
            (part, name, f"{name}=={package['version']}", package["sha256"], package["licence"])
            for part in ("validation", "train")
            for name, package in parts[part].items()
        ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise RopeExtendError(
            f"{listed} is no list of packages ({error!r}); see configs/results/code_corpus.yaml"
        ) from None
    refuse_if(not packages, f"{listed} names no package; see configs/results/code_corpus.yaml")
    refuse_if(os.path.lexists(output), f"{output} exists; give another --output, or remove it")
    check_creatable(output.parent)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:  # so an interruption leaves nothing
        corpus = Path(folder) / "corpus"
        for part, name, requirement, digest, licence in packages:
            text = download(requirement, digest)
            file = corpus / part / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"{part}/{file.name}: {file.stat().st_size:,} bytes, {licence}", flush=True)
        corpus.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", help="YAML file with the packages of each part")
    parser.add_argument("--output", required=True, help="directory of the documents")
    arguments = parser.parse_args()
    try:
        write(Path(expand_home(arguments.packages)), Path(expand_home(arguments.output)))
    except (RopeExtendError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
