"""What gets installed: one top-level package with the adapters inside it, from every kind of distribution."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import rope_extend as rx

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it alone."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_wheel_has_one_top_level_name(distributions: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(distributions[1]).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name and ".data" not in name}
    assert top == {"rope_extend"}
    assert "rope_extend/patches/llama.py" in names
    assert {"rope_extend/py.typed", "rope_extend/__init__.pyi"} <= set(names)
    assert "rope_extend/demo/model/model.safetensors" in names
    assert "rope_extend/report/page.html" in names
    assert "rope_extend/advice/recipes/llama3_8b_32k_yarn.yaml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_works_away_from_the_repository(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, *install, str(distributions[1])], check=True, capture_output=True)
    code = "import rope_extend; print(rope_extend.__file__); print(*rope_extend.supported_families())"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    ).stdout.splitlines()  # fmt: skip
    assert output[0].startswith(str(site))
    assert output[1].split() == rx.supported_families()


def test_every_package_is_listed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "rope_extend").rglob("__init__.py")
    }
    assert listed == found | {"rope_extend.patches"}


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == rx.__version__
    assert f"## {rx.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = PROJECT["project"]
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])
    assert citation["version"] == rx.__version__
    assert citation["authors"] == [{"name": "The rope_extend authors"}]  # no invented people
