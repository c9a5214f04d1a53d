"""The scripts and the notebook for users run as they are, from start to end, on the bundled model."""

from __future__ import annotations

import ast
import csv
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from cases import TRAINED, tiny_llama
from commands import ON_A_CPU, Commands
from gguf_writer import converted, writes
from logical_devices import spread
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

import rope_extend as rx
from rope_extend.demo.run import MODEL_DIR
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.resume import checkpoints, read_state

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
FINETUNE, EVALUATE, GENERATE = (str(Path(__file__).parents[2] / "scripts" / f"{name}.py")
                                for name in ("finetune", "evaluate", "generate"))  # fmt: skip
REVISION = "0123456789" * 4
TRAINING = [FINETUNE, str(MODEL_DIR), "demo:finetuning", "--target-length", "512", "--block-length", "128",
            "--positions", "pose", "--batch-size", "2"]  # fmt: skip


class Scripts:
    """Runs scripts in this process, as `python scripts/NAME.py` does; returns what they print."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def run(self, *words: object) -> str:
        self.monkeypatch.setattr(sys, "argv", [*map(str, words)])
        runpy.run_path(str(words[0]), run_name="__main__")
        return self.capsys.readouterr().out

    def fail(self, *words: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            self.run(*words)
        assert stopped.value.code == 2
        return self.capsys.readouterr().err


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Scripts:
    return Scripts(monkeypatch, capsys)


@pytest.mark.parametrize(("flags", "said"), [([], "; add --resume"), (["--resume"], ", but no checkpoint")])
def test_training_replaces_nothing(flags: list[str], said: str, scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"of another model")
    assert f"{tmp_path} holds files{said}" in scripts.fail(*TRAINING, "--output", tmp_path, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


MISTAKES = {
    "an extension": (f"{FINETUNE} MODEL DATA --target-length 16", "must exceed the trained window"),
    "an adapter": (f"{FINETUNE} BEYOND DATA --target-length 128", "Merge it first: rope-extend merge"),
    "no step": (f"{FINETUNE} MODEL DATA --target-length 64 --steps 0", "must be at least 1"),
    "a rate": (f"{FINETUNE} MODEL DATA --target-length 64 --learning-rate nan", "between 0 and 1"),
    "a block": (f"{FINETUNE} MODEL DATA --target-length 64 --block-length 128", "must be at most 64"),
    "no length": (f"{FINETUNE} MODEL DATA --target-length long", "not a length in tokens: 'long'"),
    "a length": (f"{EVALUATE} MODEL DATA --lengths 16,x", "not a length in tokens: 'x'"),
    "a method": (f"{EVALUATE} MODEL DATA --lengths 64 --method yran", "Did you mean 'yarn'"),
    "an output": (f"{EVALUATE} MODEL DATA --lengths 64 --output DATA/a.txt", "is a file; choose another"),
    "an output in use": (
        f"{EVALUATE} MODEL DATA --lengths 64 --output USED",
        "already holds table.csv; use another directory, or --overwrite",
    ),
    "short text": (f"{EVALUATE} MODEL DATA --lengths 4k", "no document of at least 4,096 tokens"),
    "a control": (
        f"{EVALUATE} BEYOND DATA --lengths 64 --base-model MODEL --control-adapter BEYOND",
        "was not trained in the old window, 32",
    ),
    "no training": (
        f"{EVALUATE} MODEL DATA --lengths 64 --control-adapter BEYOND",
        "a model that was trained",
    ),
    "no documents": (f"{EVALUATE} MODEL DATA --lengths 64 --documents 0", "--documents must be at least 1"),
    "a model": (f"{GENERATE} MODELx DATA/a.txt", "Did you mean"),
    "a file": (f"{GENERATE} MODEL DATA/b", "no file "),
    "texts": (f"{GENERATE} MODEL DATA", "no file "),
    "lengths": (f"{GENERATE} MODEL DATA/a.txt --max-new-tokens 3,8", "not a length in tokens: '3,8'"),
    "no answer": (f"{GENERATE} MODEL DATA/a.txt --max-new-tokens 0", "not a length in tokens: '0'"),
    "no room": (f"{GENERATE} MODEL DATA/a.txt --max-new-tokens 2k", "no room in a window of 32 tokens"),
    "no window": (f"{GENERATE} MODEL DATA/a.txt --method yarn", "belong together"),
}


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_before_weights_are_loaded(
    mistake: str, work: Path, plain_adapters: list[str], scripts: Scripts, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    def load(*_: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(LoadOptions, "load", load)
    monkeypatch.chdir(work)
    (tmp_path / "table.csv").touch()
    words, said = MISTAKES[mistake]
    names = {"MODEL": work / "model", "DATA": work / "data", "BEYOND": plain_adapters[1], "USED": tmp_path}
    given = [re.sub("[A-Z]{4,}", lambda name: str(names[name[0]]), word) for word in words.split()]
    assert said in scripts.fail(*given).splitlines()[-1]


@pytest.fixture(scope="module", params=["no pad and no bos", "bos and no pad", "slow", "gguf"])
def subject(request: pytest.FixtureRequest, work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of TRAINED tokens with a tokenizer of one of the kinds that users have."""
    directory, tokenizer = tmp_path_factory.mktemp("subject"), AutoTokenizer.from_pretrained(work / "model")
    if request.param == "gguf":
        return converted(tiny_llama(), directory / "model.gguf", tokenizer=writes(
            tokenizer.backend_tokenizer, "gpt2", **{"ggml.pre": "gpt-2", "ggml.add_bos_token": False}
        ))  # fmt: skip
    if request.param == "slow":
        tokenizer = ByT5Tokenizer(extra_ids=0)
    if request.param == "bos and no pad":
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        ids = [("<s>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=ids)
    tokenizer.save_pretrained(directory)
    tiny_llama(vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id).save_pretrained(directory)
    return directory


def of_control(csv_row: list[str], lm: Any, documents: list[rx.Document], *lengths: int) -> None:
    """Compare the numbers of a row with those of a model with a cropped context."""
    result = rx.perplexity(lm, documents, lengths, protocol="cropped", window=TRAINED, progress=False)
    assert [float(cell) for cell in csv_row[1:]] == pytest.approx([result.ppl[n] for n in lengths], rel=1e-4)


@pytest.mark.usefixtures("private_cache")
def test_each_script_takes_every_model(subject: Path, work: Path, scripts: Scripts, tmp_path: Path) -> None:
    """Trained, measured and generated from; the control is the model before."""
    run, data, table = tmp_path / "run", work / "data", tmp_path / "out" / "table.csv"
    run.mkdir()  # as a run that failed leaves it
    copy = shutil.copy(FINETUNE, tmp_path)  # without evaluate.py next to it
    printed = scripts.run(copy, subject, data, "--target-length", 48, "--steps", 2, "--output", run)
    assert "\n  python path/to/scripts/evaluate.py " in printed
    others = shutil.copytree(data, tmp_path / "others")
    words = [others, "--lengths", "16,32,", "64", "--documents", 2, "--output", table.parent]
    said = scripts.run(EVALUATE, run, *words).splitlines()
    assert "64 tokens exceed the window of 48 tokens, so expect nonsense after it" in said
    head, ours, control, *_ = csv.reader(table.open())
    assert head == ["row", "16", "32", "64"]
    assert (ours[0], control[0]) == ("run, yarn(factor=1.5)", f"{subject.name}, context cropped to {TRAINED}")
    known = "was trained on these texts: measure others, which it has not seen."
    undecided = "Not decided: from 32 to 64, perplexity of 2 documents is "  # training alone may help
    assert said[-1].startswith(undecided)
    documents = rx.load_documents(data, rx.load_tokenizer(subject), min_tokens=64, max_documents=2)
    of_control(control, LoadOptions(device="cpu").load(str(subject)), documents, 16, 32, 64)
    words[0] = data / "a.txt"
    said = scripts.run(EVALUATE, run, *words, "--overwrite").splitlines()
    assert said[-1] == "Not decided on run, because it " + known
    assert "prompt: the first 9 of " in scripts.run(GENERATE, run, data / "a.txt", "--max-tokens", 9)
    if subject.is_dir():  # merged weights are no control; their record has no path to the base model
        merged, words[0] = rx.merge(run, tmp_path / "merged"), others
        assert f"no directory '{subject.name}'" in scripts.fail(EVALUATE, merged, *words, "--overwrite")
        said = scripts.run(EVALUATE, merged, *words, "--base-model", subject, "--overwrite")
        assert said.splitlines()[-1].startswith(undecided)
        assert list(csv.reader(table.open()))[2] == control
    extended = [GENERATE, subject, data / "a.txt", "--method", "yarn", "--target-length", "2k"]
    assert "expect nonsense" not in scripts.run(*extended, "--max-new-tokens", 3)


@pytest.mark.usefixtures("private_cache")
def test_the_printed_commands_train_and_evaluate_the_control(
    work: Path, scripts: Scripts, tmp_path: Path
) -> None:
    """Plain RoPE in the old window, on as many tokens. Only documents to evaluate on get another name."""
    run, texts, others = tmp_path / "run", work / "data", shutil.copytree(work / "data", tmp_path / "others")
    words = ["--target-length", 48, "--batch-size", 2, "--steps", 4, "--output", run]
    printed = scripts.run(FINETUNE, work / "model", texts, *words).splitlines()[-2:]
    training, evaluation = (shlex.split(line.replace("path/to/other/documents", str(others)))
                            for line in printed)  # fmt: skip
    assert f"blocks of {TRAINED} tokens" in scripts.run(*training[1:])
    control = Path(f"{run}-control")
    assert rx.info(control).encoding == "none"
    other = scripts.fail(*training[1:], "--resume", "--steps", 9, "--learning-rate", 1e-3)
    assert "other settings: learning_rate (was 0.0002); res" in other  # more steps are allowed
    tokens = [read_state(checkpoints(each)[-1]).tokens for each in (run, control)]
    assert tokens == [2 * 4 * 48] * 2
    compared = scripts.run(*evaluation[1:])
    row = list(csv.reader((tmp_path / "run-ppl" / "table.csv").open()))[2]
    assert row[0] == f"{control.name}, context cropped to {TRAINED}"
    documents = rx.load_documents(texts, rx.load_tokenizer(work / "model"), min_tokens=48)
    lm = rx.load(control, base_model=str(work / "model"))
    of_control(row, lm, documents, TRAINED, 48)
    # What was extended twice has a control in the first window, and not in that of the first extension.
    merged, twice = rx.merge(run, tmp_path / "merged"), tmp_path / "twice"
    Path(run, "settings.json").write_text(
        Path(run, "settings.json").read_text().replace('"lora_rank": 16, ', "")
    )
    scripts.run(FINETUNE, work / "model", texts, *words, "--resume")  # of a version without that flag
    words = ["--target-length", 64, "--steps", 2, "--output", twice]
    for line in scripts.run(FINETUNE, merged, texts, *words).splitlines()[-2:]:
        scripts.run(*shlex.split(line.replace("path/to/other/documents", str(others)))[1:])
    assert f'"twice-control, context cropped to {TRAINED}"' in Path(f"{twice}-ppl", "table.csv").read_text()
    far = ["--lengths", 600, "--method", "linear", "--output", tmp_path]  # blocks of losses of 4, and of W/16
    said = scripts.run(EVALUATE, work / "model", texts, *far)
    assert f"from {TRAINED} to 600, " in said.splitlines()[-1]
    *_, control, ours, base = csv.reader((tmp_path / "table.csv").open())
    assert control[2] == ""  # some of the targets; the last line compares both rows on these
    assert base[0] == f"{control[0]}, from token {TRAINED} on, targets of the control"
    assert f" {float(ours[2]):,.1f} instead of {float(base[2]):,.1f}, " in said.splitlines()[-1]
    assert "nonsense" not in said
    alone = scripts.run(EVALUATE, run, others, "--lengths", 48, "--output", tmp_path / "alone")
    assert ["before training" in each for each in (alone, compared)] == [True, False]


@pytest.mark.parametrize(("gpus", "where"), [(0, {}), (1, {"": torch.device("cuda:0")}), (2, "auto")])
def test_a_model_is_loaded_on_the_gpus_that_there_are(
    gpus: int, where: Any, work: Path, plain_adapters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    load = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*names: Any, device_map: Any = {}, max_memory: Any = None, **more: Any) -> Any:  # noqa: B006
        given.append(device_map)
        return load(*names, **more)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(LoadOptions, "_memory_for_weights", lambda *_: {})
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    for name in (work / "model", plain_adapters[0]):
        rx.load_any(name, base_model=str(work / "model"))
    assert given == [where, where]


@pytest.mark.usefixtures("private_cache")
def test_inputs_go_to_the_device_of_the_model(
    work: Path, scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown without a GPU: tensors of two devices in one function are an error."""
    model = rx.load_any(work / "model")
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(rx, "load_any", lambda *_, empty=False, **__: tiny_llama() if empty else model)
    with spread(model, "cuda:0") as mode:
        scripts.run(EVALUATE, work / "model", work / "data", "--lengths", "16,32", "--output", tmp_path)
        scripts.run(GENERATE, work / "model", work / "data" / "a.txt", "--max-new-tokens", 3)
    assert mode.reads


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
        EVALUATE, "me/adapter", "demo:evaluation", "--lengths", "128,512", "--documents", "2",
        "--output", str(tmp_path / "evaluation"),
        environment={**ON_A_CPU, "HF_HUB_CACHE": str(tmp_path / "hub")},
    )  # fmt: skip
    _, ours, control, *_ = csv.reader((tmp_path / "evaluation" / "table.csv").open())
    assert (ours[0], control[0]) == ("adapter, yarn(factor=2)", "model, context cropped to 256")
    assert (tmp_path / "evaluation" / "perplexity.svg").exists()
    assert "2 documents" in said


def test_the_notebook_is_stored_with_what_it_shows() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 1


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
