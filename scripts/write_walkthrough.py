"""Write docs/walkthrough.md: every step of a new user with its output, from an empty virtual environment.

python scripts/write_walkthrough.py

Builds the wheel, installs it into a new environment, and runs each command there, in an empty directory. The
installation needs a network; it takes the versions of constraints.txt. Everything runs on a CPU, in minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough.md"
LLAMA3_8B = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
  "max_position_embeddings": 8192, "rope_theta": 500000.0, "dtype": "bfloat16"
}
"""
QWEN25_7B = """{
  "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
  "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
  "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
  "max_position_embeddings": 32768, "rope_theta": 1000000.0, "dtype": "bfloat16"
}
"""
FILES = {"llama3-8b/config.json": LLAMA3_8B, "qwen2.5-7b/config.json": QWEN25_7B}
"""Configs that are written by hand: sizes are all that advice and plans need."""


_NOISE = re.compile(r"\d+%\||Warning: |^Failed to load CPU|^  warnings\.warn|^Loading weights")
"""Progress bars, and warnings of other libraries."""


@dataclass(frozen=True)
class Step:
    """A command with the text above it.

    Attributes:
        text: what it is for, in Markdown.
        command: the command line, for bash.
        repeatable: whether every run prints the same: what is calculated does, what is measured does not.
    """

    text: str
    command: str
    repeatable: bool = False


STEPS = (
    Step(
        "## What is right for my model?\n\n`advise` needs a config and no weights. These two are written by "
        "hand, as files `llama3-8b/config.json` and `qwen2.5-7b/config.json`; with a network, give hub ids "
        "instead.\n\n"
        f"```json\n{LLAMA3_8B}```\n\n```json\n{QWEN25_7B}```\n\nLlama 3 8B, from 8k to 32k:",
        "rope-extend advise ./llama3-8b --target-length 32k --gpu h100 --engine vllm --output llama3.yaml",
        repeatable=True,
    ),
    Step(
        "Qwen2.5 7B, to 128k. No training is needed:",
        "rope-extend advise ./qwen2.5-7b --target-length 128k --engine vllm",
        repeatable=True,
    ),
    Step(
        "## A recipe, and whether it fits\n\nOne of the recipes in the package, for this model:",
        "rope-extend recipes copy llama3_8b_32k_yarn --model ./llama3-8b --output recipe.yaml",
        repeatable=True,
    ),
    Step(
        "The plan runs one training step without weights, and counts bytes. Will it fit a GPU of 24 GB?",
        "rope-extend finetune recipe.yaml --plan --limit-memory 24GB",
        repeatable=True,
    ),
    Step(
        "## The whole way, on a model that is here\n\nThe package has a model of 3M parameters, trained on "
        "256 tokens. On it, everything that follows takes minutes on a CPU. The commands for a real model "
        "are the same.",
        'MODEL=$(python -c "from rope_extend.data.bundled import MODEL_DIR; print(MODEL_DIR)")',
    ),
    Step(
        "Four steps of LoRA at 2k, to show the way. The demonstration takes 18:",
        "rope-extend finetune --model $MODEL --data demo:finetuning --target-length 2k --steps 4 "
        "--warmup-steps 1 --learning-rate 1e-3 --gradient-accumulation 1 --output-dir runs/yarn",
    ),
    Step(
        "Perplexity at every length, with the controls and a verdict:",
        "rope-extend evaluate $MODEL runs/yarn --methods none,yarn --data demo:evaluation --lengths "
        "256,2k --documents 2 --retrieval 0 --output report",
    ),
    Step(
        "`report/report.html` opens in any browser. Passkeys, hidden at five depths:",
        "rope-extend retrieve $MODEL runs/yarn --methods none --lengths 256 --trials 2 --output passkeys",
    ),
    Step(
        "Ask it something about a long file, before and after. This model knows Python and no questions, so "
        "it continues the file:",
        "cp $(python -c 'import argparse; print(argparse.__file__)') long.py && rope-extend generate "
        "runs/yarn --file long.py --max-tokens 1500 --new-tokens 24",
    ),
    Step(
        "## Serve it\n\nOne checkpoint for vLLM, with the encoding in its config:",
        "rope-extend export runs/yarn --to vllm --output for-vllm",
    ),
    Step(
        "Stock transformers, without rope_extend, gives the same logits:",
        "rope-extend merge runs/yarn --output merged && rope-extend verify merged",
    ),
)  # fmt: skip


def main() -> None:
    """Build, install, run every step, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", help="a virtual environment that has the wheel (default: make one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        environment = Path(arguments.environment or place / "venv")
        wheel = (
            install(environment, place)
            if arguments.environment is None
            else "rope_extend-0.1.0-py3-none-any.whl"
        )
        work = place / "work"
        work.mkdir()
        outputs = run(STEPS, work, environment / "bin")
        PAGE.write_text(page(wheel, outputs), encoding="utf-8")
    print("written:", PAGE)


def install(environment: Path, place: Path) -> str:
    """Build the wheel, and install it into a new environment; returns the wheel's name."""
    wheels = place / "wheels"
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(wheels),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [
        str(environment / "bin" / "pip"),
        "install",
        "--quiet",
        "-c",
        str(ROOT / "constraints.txt"),
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    return wheel.name


def run(steps: tuple[Step, ...], work: Path, programs: Path) -> list[str]:
    """Run steps one after the other in one directory; returns what each printed.

    Args:
        steps: the steps.
        work: an empty directory.
        programs: the directory of the programs of an environment that has the wheel.

    Raises:
        RuntimeError: a command failed; the message has its output.
    """
    for name, text in FILES.items():
        (work / name).parent.mkdir(parents=True)
        (work / name).write_text(text, encoding="utf-8")
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "COLUMNS": "100",
        "HF_HOME": str(work / "hf"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    environment.pop("PYTHONPATH", None)
    outputs, before = [], ""
    for step in steps:
        shell = ["bash", "-c", f"set -e\n{before}\n{step.command}"]
        done = subprocess.run(shell, cwd=work, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{step.command}\n{done.stdout}{done.stderr}")
        if step.command.startswith("MODEL="):
            before = step.command
        outputs.append(shown(done.stderr, work) + shown(done.stdout, work))
    return outputs


def shown(text: str, work: Path) -> str:
    """What a reader needs of an output: no progress bars, no warnings of other libraries, no long paths."""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace(f"{work}/", "").splitlines()]
    kept = [line for line in lines if not _NOISE.search(line)]
    kept = [re.sub(r"/\S*/site-packages/", ".../site-packages/", line) for line in kept]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept).strip("\n")) + "\n" if any(kept) else ""


def page(wheel: str, outputs: list[str]) -> str:
    """The page in Markdown."""
    parts = [
        "# From an empty environment",
        "<!-- written by scripts/write_walkthrough.py -->",
        "Every command of a new user, with what it printed: from an empty virtual environment to a served "
        "model. A script wrote this page by running the commands. Memory and hours of real models are "
        "calculated, not measured. The seconds are of two CPU cores that were busy with other work.",
        "## Install",
        "In a clone, build the wheel. It is all that the rest needs; the repository is not used again.",
        "```console\n$ pip wheel --no-deps --wheel-dir wheels .\n"
        f"$ python -m venv venv && . venv/bin/activate\n$ pip install wheels/{wheel}\n```",
    ]
    for step, output in zip(STEPS, outputs, strict=True):
        parts += [step.text, f"```console\n$ {step.command}\n{output}```"]
    parts.append("Next: [choose.md](choose.md), [training.md](training.md) and [measuring.md](measuring.md).")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
