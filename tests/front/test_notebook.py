"""The notebook runs from the first cell to the last, as a user runs it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_it_is_stored_without_outputs_and_its_code_compiles() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            ast.parse(cell.source)


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    done = client.execute(env=dict(os.environ))
    texts = [
        output.get("text", "") for cell in done.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    assert any(text.startswith("plain RoPE") for text in texts)
    # What was loaded gives the same perplexities as what was trained.
    trained, loaded = (text.strip().splitlines()[-1] for text in [t for t in texts if "{256:" in t][-2:])
    assert ast.literal_eval(trained) == pytest.approx(ast.literal_eval(loaded), rel=1e-4)
