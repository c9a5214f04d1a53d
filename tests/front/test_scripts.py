"""The scripts and the notebook for users run as they are, from start to end, on the bundled model."""

from __future__ import annotations

import ast
import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import torch
from commands import ON_A_CPU, Commands
from safetensors.torch import load_file

import rope_extend as rx
from rope_extend.demo.run import MODEL_DIR

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("*.py"))
FINETUNE, EVALUATE, GENERATE = (str(next(path for path in SCRIPTS if path.stem == name))
                                for name in ("finetune", "evaluate", "generate"))  # fmt: skip
REVISION = "0123456789" * 4
TRAINING = [FINETUNE, str(MODEL_DIR), "demo:finetuning", "--target-length", "512", "--block-length", "128",
            "--positions", "pose", "--batch-size", "2"]  # fmt: skip


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_uses_public_names_alone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert "from rope_extend" not in text
    assert "import rope_extend." not in text


@pytest.mark.parametrize(("flags", "said"), [([], "exists"), (["--resume"], "no checkpoint to resume")])
def test_training_replaces_nothing(flags: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"of another model")
    command = [sys.executable, *TRAINING, "--steps", "1", "--output", str(tmp_path), *flags]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert f"{tmp_path} " in found.stderr
    assert said in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.slow
def test_from_training_to_text(commands: Commands, tmp_path: Path) -> None:
    """A run that is killed and resumed ends with the weights of one that was not, which all commands read."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = [*TRAINING, "--steps", "60"]
    commands.run(*words, "--output", str(whole), environment=ON_A_CPU)
    process = commands.start(*words, "--output", str(killed), environment=ON_A_CPU)
    state = killed / "checkpoint-50" / "trainer_state.json"  # the last file of a checkpoint
    deadline = time.monotonic() + 300
    while not state.exists() or not state.stat().st_size:
        assert time.monotonic() < deadline, commands.printed()
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(process, signal.SIGKILL)
    assert commands.wait() == -signal.SIGKILL, commands.printed()
    (killed / "checkpoint-55").mkdir()  # as if it had been killed while it wrote this one
    commands.run(*words, "--output", str(killed), "--resume", environment=ON_A_CPU)
    weights = [load_file(each / "adapter_model.safetensors") for each in (whole, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert str(rx.current_patch(rx.load(whole)).encoding) == "yarn(factor=2)"

    hub = tmp_path / "hub" / "models--me--adapter"  # what a download of a hub id leaves
    shutil.copytree(whole, hub / "snapshots" / REVISION, ignore=shutil.ignore_patterns("checkpoint-*"))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(REVISION)
    (hub / ".no_exist" / REVISION).mkdir(parents=True)
    (hub / ".no_exist" / REVISION / "config.json").touch()
    said = commands.run(
        EVALUATE, "me/adapter", "demo:evaluation", "--lengths", "128", "512", "--documents", "2",
        "--output", str(tmp_path / "evaluation"),
        environment={**ON_A_CPU, "HF_HUB_CACHE": str(tmp_path / "hub")},
    )  # fmt: skip
    head, ours, control = csv.reader((tmp_path / "evaluation" / "table.csv").open())
    assert head == ["row", "128", "512"]
    assert ours[0] == "yarn(factor=2)"
    assert "cropped to 256" in control[0]
    assert float(ours[1]) == pytest.approx(float(control[1]), rel=1e-3)
    assert (tmp_path / "evaluation" / "perplexity.svg").exists()
    assert "2 documents" in said
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def read(path):\n    with open(path) as file:\n" * 20)
    assert "tokens of prompt" in commands.run(GENERATE, str(whole), str(prompt), "--max-new-tokens", "5")
    commands.run(
        GENERATE, str(MODEL_DIR), str(prompt), "--method", "dynamic_yarn", "--target-length", "1024",
        "--max-new-tokens", "5", environment=ON_A_CPU,
    )  # fmt: skip
    commands.run(
        "evaluate", str(MODEL_DIR), "--adapters", str(whole), "--lengths", "256,512", "--retrieval", "0",
        "--data", "demo:evaluation", "--documents", "2", "--output", str(tmp_path / "command"),
        environment=ON_A_CPU,
    )  # fmt: skip


def test_the_notebook_is_stored_with_what_it_shows() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
