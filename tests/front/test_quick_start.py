"""The command line answers before torch is imported, and the package imports only what is used."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rope_extend as rx
from rope_extend.cli.main import COMMANDS, examples, parse
from rope_extend.data.bundled import MODEL_DIR

HEAVY = (
    "torch", "numpy", "transformers", "datasets", "matplotlib", "peft", "accelerate", "bitsandbytes", "pandas"
)  # fmt: skip
"""Modules that take from a quarter of a second to several seconds to import."""
ROOT = Path(__file__).parents[2]

LIGHT = [
    *((f"{name} --help", 0, "examples:") for name in COMMANDS),
    ("--help", 0, "start here"),
    ("finetune --help", 0, "--help-all explains more flags: method, data and blocks"),
    ("finetune --help-all", 0, "--lora-rank"),
    ("--version", 0, rx.__version__),
    ("", 2, "usage"),
    ("evalute model", 2, "Did you mean 'evaluate'"),
    ("info", 2, "model"),
    ("info ./no/such/model", 2, "no such directory: './no/such/model'"),
    ("merge ./no/such/adapter --output o", 2, "no such directory: './no/such/adapter'"),
    ("info model --trained-length banana", 2, "not a length in tokens: 'banana'"),
    ("advise model --target-length 4k --gpu h1000", 2, "no GPU is known as 'h1000'. Give the name"),
    ("export runs --to ollama --output o", 2, "GGUF files of llama.cpp"),
    ("recipes llama_7b_32k_yran", 2, "Did you mean 'llama_7b_32k_yarn'"),
    ("generate model --file no-such-book.txt", 2, "no such file: 'no-such-book.txt'"),
    ("generate model --file book.txt --method yran", 2, "Did you mean 'yarn'"),
    ("finetune no-such-recipe.yaml", 2, "no-such-recipe.yaml"),
    (f"finetune {MODEL_DIR} --data bok.txt --output o --target-length 4k", 2, "no file matches 'bok.txt'"),
    ("finetune --model m --data d --output o --target-length 4k --method yran", 2, "Did you mean 'yarn'"),
    ("finetune --model m --data d --output o --target-length 4k --steps ten", 2, "steps must be"),
    ("finetune --model m --limit-memory 24", 2, "with its unit"),
    ("evaluate m --data d --output o --lengths 32kb", 2, "--lengths must be"),
    ("evaluate m --data d --output o --protocol slidng", 2, "sliding"),
    ("demo --methods yran", 2, "Did you mean 'yarn'"),
    ("finetune --model m --data d --output o --target-length 64 --json", 2, "--json belongs to --plan"),
    ("finetune m --data d", 2, "missing output_dir"),
    ("finetune m --model m --data d --output o", 2, "two models are given"),
    ("finetune llama_7b_32k_yran", 2, "Did you mean 'llama_7b_32k_yarn'"),
]
"""Command lines that need no torch: the exit status, and a part of what they print."""

RUN_ALL = """
import contextlib, io, json, shlex, sys
from rope_extend.cli.main import main
for line in json.load(sys.stdin):
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(shlex.split(line))
        except SystemExit as error:
            status = error.code or 0
    loaded = [name for name in %r if name in sys.modules]
    print(json.dumps([line, status, out.getvalue(), loaded]))
"""


def python(code: str, *, stdin: str = "", cwd: Path | None = None) -> str:
    """What a program prints, in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], input=stdin, capture_output=True, text=True, timeout=300, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Status, output and heavy modules so far of each line of `LIGHT`, all run by one Python."""
    lines = json.dumps([line for line, *_ in LIGHT])
    said = python(RUN_ALL % (HEAVY,), stdin=lines, cwd=tmp_path_factory.mktemp("empty")).splitlines()
    return {line: (status, out, loaded) for line, status, out, loaded in map(json.loads, said)}


@pytest.mark.parametrize(("line", "status", "text"), LIGHT, ids=lambda value: str(value)[:60])
def test_help_and_mistakes_import_nothing_heavy(
    answers: dict[str, tuple[int, str, list[str]]], line: str, status: int, text: str
) -> None:
    got_status, out, loaded = answers[line]
    assert (got_status, loaded) == (status, []), out
    assert text in out
    assert status == 0 or not line or len(out.splitlines()) <= 3  # the mistake, not the whole usage


def test_examples_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()  # `convert` takes a file that exists
    for name in COMMANDS:
        assert examples(name)
        for example in examples(name):
            assert parse(shlex.split(example))


def test_the_lazy_names_are_those_of_their_modules() -> None:
    assert len(rx.__all__) == len(rx._MODULE_OF) + 1 > 40
    assert set(rx.__all__) <= set(dir(rx))
    for name, module in rx._MODULE_OF.items():
        assert getattr(rx, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'extned'"):
        rx.extned  # noqa: B018


@pytest.fixture(scope="module")
def plugin_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a config that stock transformers must not load."""
    directory = tmp_path_factory.mktemp("plugin-only")
    config = {"model_type": "rope_extend", "rope_extend_family": "llama"}
    config["rope_extend_config"] = {"max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_extend_imports_no_more_than_the_model_needs(plugin_only: Path) -> None:
    """transformers' own modelling code imports accelerate where it is installed; the rest is not needed.

    A plugin-only checkpoint is known although transformers was imported first.
    """
    code = f"""
import sys
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
    max_position_embeddings=64,
))
before = set(sys.modules)
import rope_extend as rx
rx.extend(model, "512")
print(sorted(set({HEAVY}) & (set(sys.modules) - before)), rx.current_patch(model).encoding)
print(type(AutoConfig.from_pretrained({str(plugin_only)!r})).__name__)
"""
    assert python(code).splitlines() == ["[] yarn(factor=8)", "GuardedConfig"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import rope_extend\nfrom transformers import AutoModelForCausalLM, AutoConfig",
        "from transformers import AutoModelForCausalLM, AutoConfig\nimport rope_extend",
        "import importlib, transformers, rope_extend\nAutoConfig = transformers.AutoConfig\n"
        "importlib.reload(rope_extend)\nAutoModelForCausalLM = transformers.AutoModelForCausalLM",
    ],
    ids=["rope_extend first", "transformers first", "lazily, with a reload in between"],
)
def test_plugin_only_checkpoints_are_known_in_any_order_of_imports(imports: str, plugin_only: Path) -> None:
    code = f"""
{imports}
import pickle
config = AutoConfig.from_pretrained({str(plugin_only)!r})
print(type(config).__name__, config.model_type, config.max_position_embeddings)
print(AutoModelForCausalLM._model_mapping[type(config)].__name__)
print(pickle.loads(pickle.dumps(type(config))) is type(config))
"""
    assert python(code).splitlines() == ["GuardedConfig llama 64", "GuardedModel", "True"]


@pytest.mark.parametrize("line", ["--help", "finetune --help"])
def test_a_reader_that_stops_is_no_error(line: str) -> None:
    """As in `rope-extend --help | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "rope_extend", *line.split()]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("line", "uses_peft"), [("info", False), ("advise --target-length 128", True)])
def test_a_command_that_reads_a_config_imports_quickly(line: str, uses_peft: bool, work: Path) -> None:
    """peft would import kernels for 4 bits, transformers all of scipy, and Python look for garbage often."""
    arguments = [*line.split(), str(work / "model")]
    code = f"import gc, sys; from rope_extend.cli.main import main; main({arguments})"
    code += "; print(gc.get_stats()[0]['collections'], gc.isenabled(), *sys.modules)"
    searches, enabled, *loaded = python(code).splitlines()[-1].split()
    assert ("peft" in loaded) == uses_peft
    assert not {"bitsandbytes", "scipy", "scipy.optimize"} & {*loaded}
    assert enabled == "True"
    assert int(searches) < 400  # it would be twice as often
