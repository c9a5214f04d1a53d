"""The command line: every command on a tiny model, and one clear line for every mistake."""

from __future__ import annotations

import errno
import inspect
import json
import logging
import math
import re
import shlex
from pathlib import Path

import pytest
from cases import TRAINED
from transformers import MaxLengthCriteria

import rope_extend as rx
from rope_extend.cli.arguments import in_flags
from rope_extend.cli.main import COMMANDS, main, parse
from rope_extend.cli.measure import model_config
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import RetrievalConfig
from rope_extend.models.locating import check_path, is_path, local_directory
from rope_extend.units import format_bytes

pytestmark = pytest.mark.usefixtures("private_cache")


def run(command: str, capsys: pytest.CaptureFixture[str], **names: object) -> str:
    main(shlex.split(command.format(**names)))
    return capsys.readouterr().out


def fail(command: str, capsys: pytest.CaptureFixture[str], **names: object) -> str:
    with pytest.raises(SystemExit) as error:
        main(shlex.split(command.format(**names)))
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run("methods --json", capsys))
    assert [row["name"] for row in rows] == rx.encoding_names()
    text = run("methods", capsys)
    for row in rows:
        assert row["paper"] in text


def test_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(json.loads(run("families --json", capsys))) == rx.supported_families()
    assert "gpt_neox" in run("families", capsys)


def test_plans_are_json_with_the_numbers_of_the_text(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = f"finetune --model {work / 'model'} --target-length 128 --plan --limit-memory 1GB"
    plan = json.loads(run(f"{training} --json", capsys))
    assert (plan["length"], plan["available"], plan["longest_block"]) == (128, 10**9, None)
    assert [step["chosen"] for step in plan["steps"]].count(True) == 1
    for step in plan["steps"]:
        assert step["total"] == step["weights"] + step["trained"] + step["peak"]
        assert step["fits"] == (step["total"] <= 10**9)
    assert format_bytes(plan["steps"][0]["total"]) in run(training, capsys)
    evaluation = f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16,64 --plan --json"
    plan = json.loads(run(evaluation, capsys))
    assert {16, 64} <= {length["length"] for length in plan["lengths"]}
    assert all(length["fits"] and length["seconds"] > 0 for length in plan["lengths"])
    assert plan["work"]


@pytest.mark.parametrize(
    "way", [("{},{}",), ("{}", "{}"), ("{} {}",), ("{} , {}",), ("{},", "{},")], ids=" / ".join
)
def test_lists_have_commas_or_spaces_and_a_model_may_follow(way: tuple[str, ...]) -> None:
    composed = "resonance(yarn(beta_fast=16, beta_slow=2))"

    def written(*pair: str) -> list[str]:
        each = zip(way, pair, strict=True) if len(way) == 2 else ()
        return [part.format(value) for part, value in each] or [way[0].format(*pair)]

    for name, pair, values in (
        ("lengths", ("4k", "8192"), (4096, 8192)),
        ("methods", (composed, "as-is"), (composed, "as-is")),
        ("depths", ("0", "0.5"), (0.0, 0.5)),
        ("tasks", ("passkey", "needle"), ("passkey", "needle")),
    ):
        config = model_config(RetrievalConfig, parse(["retrieve", f"--{name}", *written(*pair), "model"]))
        assert (getattr(config, name), config.model) == (values, "model")
    assert parse(["demo", "--methods", *written("none", "yarn")]).methods == ["none", "yarn"]


def test_info_reads_the_config_alone(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((work / "model" / "config.json").read_bytes())
    found = json.loads(run("info {model} --json", capsys, model=tmp_path))
    assert found["shape"] == {"dim": 16, "theta": 10_000.0, "trained_length": TRAINED}
    assert found["encoding"] == "none"
    shown = run("info {model}", capsys, model=tmp_path)
    assert "encoding        none (plain RoPE)\n" in shown
    assert "trained window  32 tokens" in shown
    slow = next(int(words[2]) for words in map(str.split, shown.splitlines()) if words[0] == "slow")
    assert slow == found["slow_channels"] == sum(TRAINED * 1e4 ** (-n / 8) < 2 * math.pi for n in range(8))


def test_noise_of_libraries_is_hidden_and_their_errors_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    """What they warn of whatever the user does; peft does whenever it is imported without a network."""
    run("methods", capsys)
    for name, noise in (
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: ..."),
        (MaxLengthCriteria.__module__, inspect.getsource(MaxLengthCriteria).split('"')[-6]),
    ):
        logger = logging.getLogger(name)
        said = (logger.makeRecord(name, 30, "", 0, text, (), None) for text in (noise, "out of memory"))
        assert [bool(logger.filter(record)) for record in said] == [False, True]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("info {out}", "has no config.json"),
        ("evaluate {model} --lenghts 16 --output {out}/x", "Did you mean '--lengths'"),
        (
            "evaluate {model} --task x --output {out}/x",
            "no option is named '--task'. '--tasks' is an option of retrieve, ",
        ),
        ("compare {out}", "compare needs two runs, and got 1"),
        ("finetune --model {model} --data {data} --output {out}/x", "target_length"),
        ("finetune --model {model} --data {out} --output {out}/x --target-length 64", "nothing to read"),
        ("finetune --model {model} --data {data} --output {out}/x --target-length 64k", "tokens"),
        ("evaluate {model} --data {data} --lengths 16 --methods yarn --output {out}/x", "nothing to extend"),
        ("evaluate {model} {out} --data {data} --lengths 16 --output {out}/x", "no rope_extend.json"),
        ("evaluate {model} --data {data} --lengths 4k --output {out}/x", "no document of at least"),
        ("evaluate {out} --data {data} --output {out}/x", "has no config.json"),
        ("advise {model} --target-length -4k", "not a length in tokens: '-4k'"),
        ("finetune {model} --data {data} --output {out}/x --target-length -4k", "or 32k; got '-4k'"),
        ("evaluate {model} --lengths -4k 8k --output {out}/x", "such as [4k, 8k]; got '-4k,8k'"),
        ("evaluate --lengths 16 32 {model} {out}/y --data {data} --output {out}/x", "there is no directory"),
    ],
)
def test_mistakes_are_one_clear_line(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert message in fail(command, capsys, model=work / "model", data=work / "data", out=tmp_path)
    assert not (tmp_path / "x").exists()  # nothing was begun


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("holds a report; use overwrite=True", "holds a report; use --overwrite"),
        ("use overwrite=True (--overwrite) or stop", "use --overwrite or stop"),
        ("give base_model= the former", "give --base-model the former"),
        ("quantize='4bit' needs bitsandbytes", "--quantize 4bit needs bitsandbytes"),
        ("attention='flash' needs a GPU", "--attn flash needs a GPU"),
        ("set cropped=False", "set --no-cropped"),
        ("yarn(factor=8, overwrite=True)", "yarn(factor=8, overwrite=True)"),
        (
            "RopeShape(dim=8, base_model=1); give base_model='m'",
            "RopeShape(dim=8, base_model=1); give --base-model m",
        ),
        ("rope_parameters=None and other=True", "rope_parameters=None and other=True"),
        ("overwrite=None", "overwrite=None"),
    ],
)
def test_errors_name_flags_on_the_command_line(message: str, shown: str) -> None:
    flags = {
        "overwrite": "--overwrite", "base_model": "--base-model", "quantize": "--quantize",
        "attention": "--attn", "no_cropped": "--no-cropped",
    }  # fmt: skip
    assert in_flags(message, flags) == shown


def test_a_mistyped_path_names_the_nearest_directory(tmp_path: Path) -> None:
    (tmp_path / "runs" / "yarn").mkdir(parents=True)
    for name in (f"{tmp_path}/runs/yran", f"{tmp_path}/runs/yran/"):
        with pytest.raises(RopeExtendError, match=r"no such directory.*Did you mean '.*runs/yarn'"):
            check_path(name)
        with pytest.raises(RopeExtendError, match=r"Did you mean '.*runs/yarn'\? Give a hub id, or"):
            local_directory(name)
    with pytest.raises(RopeExtendError, match="no file can be called"):
        check_path(f"{tmp_path}/{'x' * 5000}")
    for name in ("gpt2", "meta-llama/Llama-3.1-8B", str(tmp_path / "runs"), "owner/name.v2"):
        check_path(name)
    assert [is_path(name) for name in ("./a", "../a", "/a", "~/a", "a/b/c", "a/", ".", "a b")] == [True] * 8


def test_a_full_disk_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def families(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "picture.png")

    monkeypatch.setitem(COMMANDS, "families", families)
    assert re.search("the disk is full .*picture.png", fail("families", capsys))
