"""The settings of evaluations: from YAML, from flags, with defaults, and with mistakes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from rope_extend.cli.main import main, parse
from rope_extend.cli.measure import model_config
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.encodings import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import method_encoding
from rope_extend.evaluation.evaluate import how_it_was_made
from rope_extend.evaluation.evaluation_config import (
    LOADING,
    EvaluationConfig,
    ModelConfig,
    RetrievalConfig,
    StudyConfig,
)
from rope_extend.models.load_options import LoadOptions
from rope_extend.searching.search_config import SearchConfig
from rope_extend.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = {"perplexity": EvaluationConfig, "retrieval": RetrievalConfig}


def from_flags(cls: type[ModelConfig], text: str) -> Any:
    return model_config(cls, parse(shlex.split(f"{cls.command} {text}")))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_files_hold_valid_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = f"configs/evaluation/demo_{name}.yaml"
    config = EXAMPLES[name].from_yaml(file)
    assert Path(config.model).resolve() == MODEL_DIR
    assert config.output is None
    assert from_flags(EXAMPLES[name], f"{file} runs/yarn --output out --lengths 512,1k") == EXAMPLES[
        name
    ].from_yaml(file, {"adapters": ["runs/yarn"], "output": "out", "lengths": [512, 1024]})


CODER, SMOLLM2 = RopeShape(128, 1e6, 32_768), RopeShape(64, 1e5, 8192)


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/results/*.yaml")), ids=lambda file: file.stem)
def test_the_settings_of_the_results_fit_their_models(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their runs take hours of a GPU: a method that a command refuses is found before."""
    monkeypatch.chdir(ROOT)
    command = re.search(r"^# .*rope-extend (\w+) ", file.read_text(), re.MULTILINE)
    if command is None:
        assert file.stem in ("code_corpus", "coder_corpus")  # of a tool
    elif command[1] in ("report", "retrieve"):
        config = (StudyConfig if command[1] == "report" else RetrievalConfig).from_yaml(file)
        shape = CODER if file.stem.startswith("coder") else SMOLLM2
        assert all(method_encoding(each, shape, config.lengths[-1]) is not None for each in config.methods)
    else:
        assert {"finetune": Recipe, "search": SearchConfig}[command[1]].from_yaml(
            file, {"model": "m", "data": "d", "output_dir" if command[1] == "finetune" else "output": "o"}
        )


def test_values_from_yaml_flags_and_python_are_equal() -> None:
    config = from_flags(
        EvaluationConfig,
        f"{MODEL_DIR} a b --data x --data 'y*' --lengths 4k,512 --methods yarn,as-is,yarn --documents 3 "
        "--protocol sliding --stride 128 --chunk 2k --no-cropped --retrieval 0 --max-tokens 1M "
        "--device-map auto --dtype bfloat16 --attn eager --limit-memory 1.5GiB --trained-length 256",
    )
    assert config == EvaluationConfig(
        model=MODEL_DIR, adapters=["a", "b"], data=["x", "y*"], lengths=["512", 4096],
        methods="yarn, as-is", max_documents=3, protocol="sliding", stride="128", chunk=2048, cropped=False,
        retrieval=0, max_tokens=2**20, device_map="auto", dtype="bfloat16",
        attention="eager", limit_memory=3 * 2**29, trained_length=256,
    )  # fmt: skip
    assert (config.lengths, config.methods, config.data) == ((512, 4096), ("yarn", "as-is"), ("x", "y*"))
    assert EvaluationConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    assert from_flags(EvaluationConfig, f"{MODEL_DIR} --data x").data == "x"
    assert from_flags(EvaluationConfig, f"{MODEL_DIR}").methods == ("as-is",)
    assert from_flags(EvaluationConfig, f"{MODEL_DIR} a").methods == ()

    retrieval = from_flags(
        RetrievalConfig,
        f"--model {MODEL_DIR} --tasks needle,passkey --depths 0.5,0 --trials 2 --chat on "
        "--seed 7 --no-cropped",
    )
    assert retrieval == RetrievalConfig(
        model=MODEL_DIR, tasks=["needle", "passkey"], depths=[0, 0.5], trials=2, chat="on", seed=7,
        cropped=False,
    )  # fmt: skip
    assert retrieval.depths == (0, 0.5)
    assert RetrievalConfig.from_dict(yaml.safe_load(retrieval.to_yaml())) == retrieval
    assert RetrievalConfig(model=MODEL_DIR, chat=yaml.safe_load("on")).chat == "on"  # true, in YAML 1.1


def test_load_options_are_those_of_the_settings() -> None:
    assert {item.name for item in fields(LoadOptions)} == {*ModelConfig.groups[LOADING], "split_window"}
    config = EvaluationConfig(model=MODEL_DIR, device="cpu", dtype="float32", limit_memory="2GB")
    options = LoadOptions.of(config)
    assert (options.device, str(options.dtype), options.limit_memory) == ("cpu", "torch.float32", 2 * 10**9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lenghts": [64]}, "unknown key 'lenghts'. Did you mean 'lengths'?"),
        ({"lengths": [0]}, r"lengths must be a list of token counts.*; got \[0\]"),
        ({"stride": 4}, "protocol 'prefix' takes no stride; got 4"),
        ({"methods": []}, "nothing to measure, because methods and adapters are both empty"),
        ({"model": "./nowhere"}, "no such directory"),
        ({"limit_memory": 24}, "limit_memory must be a size with its unit, such as 24GB; got 24"),
        ({"device_map": "nearly"}, "device_map must be one of auto"),
        ({"retrieval": -1}, "retrieval must be auto, or a whole number, at least 0; got -1"),
        ({"max_documents": 0}, "max_documents must be null, or a whole number, at least 1"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeExtendError, match=message):
        EvaluationConfig.from_dict({"model": str(MODEL_DIR), **settings})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("evaluate {model} --plan --protocol slidng", "no perplexity protocol 'slidng'"),
        ("evaluate {model} --plan --limit-memory 24", "--limit-memory must be a size with its unit"),
        ("evaluate {model} --plan --lengths 1", "numbers of tokens, 2 or above; got"),
        ("evaluate {model} --lengths 1k", "evaluate needs --data and --output, or --plan"),
        ("evaluate --plan", "missing model; add to the YAML file, or give --model"),
        ("evaluate nothing.yaml --plan", "cannot read the evaluation nothing.yaml"),
        ("retrieve {model}", "retrieve needs --output"),
        ("retrieve {model} --output x --tasks nothing", "--tasks must be a list of passkey"),
        ("retrieve {model} --output x --tasks none", "retrieval: tasks is empty; name one of passkey"),
        ("evaluate a/model --model another/model --plan", "and by --model"),
        ("evaluate a/model an/adapter --adapters another/adapter --plan", "and by --adapters"),
        ("evaluate a/model --plan --lengths ''", "--lengths must be"),  # it does not mean the default
    ],
)  # fmt: skip
def test_the_command_line_names_flags(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line.format(model=MODEL_DIR)))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_settings_need_no_torch() -> None:
    code = (
        "import sys; import rope_extend.evaluation.evaluation_config; "
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


CONFIGS: list[tuple[type[ModelConfig], dict[str, Any]]] = [
    (EvaluationConfig, {
        "data": ["a b", "c"], "lengths": "4k,8k", "methods": ["none", "yarn(beta_fast=32,beta_slow=1)"],
        "cropped": False, "retrieval": 2, "retrieval_lengths": [8192], "budget": "90min",
        "max_documents": 3, "limit_memory": "20GB", "attention": "eager", "trained_length": 4096,
        "output": "it's here",
    }),
    (EvaluationConfig, {"data": ["-b", "c"], "max_documents": None}),
    (RetrievalConfig, {
        "tasks": ["passkey", "needle"], "depths": [0, 0.25, 1], "chat": False, "cropped": False,
    }),
    (StudyConfig, {"target_length": "32k", "tasks": [], "budget": 5400.5, "data": "books"}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "values"), CONFIGS)
def test_a_copied_file_has_the_same_settings(cls: type[ModelConfig], values: dict[str, Any]) -> None:
    config = cls.from_dict({"model": "owner/model", **values})
    text = how_it_was_made(config).text
    assert text.startswith(f"# rope-extend {cls.command} settings.yaml\n")
    assert cls.from_dict(yaml.safe_load(text)) == config


def test_paths_of_the_author_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in the working directory are as seen from there; of others, the last part is shown."""
    for name in ("here/model", "jane/searched"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    searched = tmp_path / "jane" / "searched"
    (searched / "encoding.json").write_text("{}")
    config = EvaluationConfig(
        model=str(tmp_path / "here" / "model"),
        data=("/data/pg19/test", "/data/arxiv/test", str(Path.cwd() / ".." / "private" / "books")),
        adapters=("../runs/a/final", "../runs/b/final"),
        methods=("none", str(searched)),
    )
    text = how_it_was_made(config).text
    values = yaml.safe_load(text)
    assert values["model"] == "model"
    assert not any(name in text for name in (str(tmp_path), "/data", ".."))
    assert values["data"] == ["test", "test", "books"]
    assert values["adapters"] == ["final", "final"]
    assert values["methods"] == ["none", "searched"]
