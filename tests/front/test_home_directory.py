"""A leading `~` is the home directory wherever a path is given, also where no shell has expanded it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, llama
from integrity import logits, with_lora
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.card import write_card
from rope_extend.checks import field_hints
from rope_extend.cli.arguments import size
from rope_extend.cli.main import COMMANDS, command_parser
from rope_extend.config import SOURCES, Config
from rope_extend.data.sources import source_files
from rope_extend.evaluation.evaluation_config import EvaluationConfig, RetrievalConfig, StudyConfig
from rope_extend.method_names import ENCODING_FILE, encoding_file
from rope_extend.searching.search_config import SearchConfig
from rope_extend.training.recipe import Recipe

SETTINGS: tuple[type[Config], ...] = (Recipe, EvaluationConfig, RetrievalConfig, SearchConfig, StudyConfig)
NAMES_A_PATH = re.compile(r"director(y|ies)\b|\bfile\b|\bpath\b|\bFILE\b|\bDIR\b|\bPATH\b|base model")
IN_SETTINGS = {"config", "adapter_paths"}
"""Arguments whose values are read as those of the settings' fields."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with an entry `x`, and another directory to work in."""
    for name in ("home", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "home" / "x").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "home"


def test_every_argument_that_is_a_path_expands_it(home: Path) -> None:
    fields = {name for cls in SETTINGS for name in field_hints(cls)}
    seen = set()
    for command in COMMANDS:
        for action in command_parser(command)._actions:
            plain = action.type is not None or action.dest not in fields | IN_SETTINGS
            if action.nargs == 0 or action.type is size or action.dest == "data":
                continue  # no value, or texts, which are expanded when they are read
            if plain and NAMES_A_PATH.search(f"{action.help} {action.metavar}"):
                assert callable(action.type), (command, action.dest)
                assert action.type("~/x") == str(home / "x"), (command, action.dest)
                seen.add((command, action.dest))
    assert {("merge", "output"), ("export", "gguf"), ("finetune", "config"), ("info", "model")} <= seen


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_that_is_a_path_expands_it(settings: type[Config], home: Path) -> None:
    seen = set()
    for name, (kind, text) in field_hints(settings).items():
        if NAMES_A_PATH.search(text) and not kind.expected.startswith(SOURCES.expected):
            assert kind.parse("~/x") in (str(home / "x"), (str(home / "x"),)), name
            seen.add(name)
    assert "model" in seen
    assert {"output", "output_dir"} & seen


def test_functions_write_and_read_there(home: Path) -> None:
    llama().save_pretrained(home / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(home / "base")
    rx.extend(model, TARGET, "yarn")
    wrapped = with_lora(model)
    assert rx.save(wrapped, "~/run") == home / "run"
    assert rx.merge("~/run", "~/merged", base_model="~/base") == home / "merged"
    assert rx.export("~/merged", "~/exported", verify=False) == home / "exported"
    write_card("~/run")
    (home / "a.txt").write_text("a text")
    assert list(source_files("~/*.txt")) == [home / "a.txt"]
    (home / "x" / ENCODING_FILE).write_text("{}")
    assert encoding_file("~/x") == home / "x" / ENCODING_FILE
    assert torch.equal(logits(rx.load("~/run", base_model="~/base")), logits(wrapped))
    assert rx.info("~/run").encoding == rx.info("~/merged").encoding
    made = {"base", "run", "merged", "exported"}
    assert {path.name for path in home.iterdir()} == {*made, "x", "a.txt"}
    assert not any(Path().iterdir())
