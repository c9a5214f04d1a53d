"""Verification: a process without rope_extend decides, and it distinguishes right from wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import llama
from integrity import contents, extended, rewritten, tuned
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint import stock_reader, verifying
from rope_extend.checkpoint.model_type import guarded_config, plain_config
from rope_extend.cli.main import command_parser, main
from rope_extend.data.bundled import MODEL_DIR


def saved(directory: Path, method: str = "yarn", model: Any = None) -> Path:
    return rx.save(extended(method, model), directory)


def edited(directory: Path, **changes: Any) -> None:
    """Change `rope_parameters` in a config by hand."""
    rewritten(directory / "config.json", lambda data: data["rope_parameters"].update(changes))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the other process's logits in this one: the other one takes five seconds to start."""

    def stock(directory: Path, inputs: Any) -> Any:
        try:
            if "rope_extend_family" in (directory / "config.json").read_text():
                raise ValueError("model type `rope_extend` is not recognized")
            return verifying.logits(AutoModelForCausalLM.from_pretrained(directory).eval(), inputs)
        except (ValueError, rx.RopeExtendError) as error:
            return str(error)

    monkeypatch.setattr(verifying, "_stock_logits", stock)


def test_rope_extend_is_barred_from_the_process() -> None:
    code = (
        f"import runpy; reader = runpy.run_path({stock_reader.__file__!r}); reader['bar']()\n"
        "for name in ('rope_extend', 'rope_extend.checkpoint', 'rope_extend.patches'):\n"
        "    try:\n        __import__(name)\n"
        "    except ImportError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("halted" in line or "is not a package" in line for line in lines)
    # Without the bar, the import works: only the bar prevents it.
    subprocess.run(
        [sys.executable, "-P", "-c", "import importlib.util as u; assert u.find_spec('rope_extend')"],
        check=True,
    )


@pytest.mark.slow
def test_another_process_decides(tmp_path: Path) -> None:
    directory = saved(tmp_path / "full")
    before = contents(directory)
    found = rx.verify(directory)
    assert found.check() is found
    assert found.verdict == "equal"
    assert found.inside < 1e-4
    assert found.beyond < 1e-4
    assert contents(directory) == before
    found = rx.verify(saved(tmp_path / "logn", "logn"))
    assert found.verdict == "needs rope_extend"
    assert "rope_extend` but Transformers does not recognize" in found.reason
    assert (found.inside, found.beyond) == (None, None)  # a model is not compared with itself
    assert "Nothing was compared" in found.reason
    assert rx.verify(tmp_path / "logn", reference=tmp_path / "logn").beyond == 0.0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("method", ["logn", "dynamic_yarn", "xpos"])
def test_so_is_what_stock_transformers_reads_on_the_old_window(tmp_path: Path, method: str) -> None:
    directory = saved(tmp_path / "full", method)
    rewritten(directory / "config.json", plain_config)
    found = rx.verify(directory)
    assert found.verdict == "needs rope_extend"
    assert "a logit is off by" in found.reason


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "changes",
    [{"factor": 4.0}, {"rope_theta": 500.0}, {"truncate": False}, {"attention_factor": 1.0}],
    ids=str,
)
def test_a_config_that_was_tampered_with_differs(tmp_path: Path, changes: dict[str, float]) -> None:
    directory = saved(tmp_path / "full")
    original = rx.load(directory)
    edited(directory, **changes)
    found = rx.verify(directory, reference=original)
    assert found.verdict == "differs"
    with pytest.raises(rx.RopeExtendError, match="failed: stock transformers: a logit is off by"):
        found.check()
    with pytest.raises(rx.RopeExtendError, match=r"config 'config.json' .* is not what was saved"):
        rx.verify(directory)  # the digests find it first


@pytest.mark.usefixtures("here")
def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = saved(tmp_path / "full")
    default = signature(rx.verify).parameters["tolerance"].default
    assert command_parser("verify").parse_args([str(directory)]).tolerance == default
    main(["verify", str(directory)])
    out = capsys.readouterr().out
    assert "equal: stock transformers alone computes the same logits" in out
    assert "largest difference of a logit beyond the pretrained window" in out
    other = saved(tmp_path / "other", "linear")
    with pytest.raises(SystemExit):
        main(["verify", str(directory), "--reference", str(other)])
    assert "verification failed" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_what_cannot_be_loaded_differs(tmp_path: Path) -> None:
    directory = saved(tmp_path / "full")
    original = rx.load(directory)
    rewritten(directory / "config.json", guarded_config)  # of an encoding that stock reads
    found = rx.verify(directory, reference=original)
    assert found.verdict == "differs"
    assert "cannot be loaded" in found.reason


@pytest.mark.usefixtures("here")
def test_a_merge_is_compared_with_its_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "base")
    live = tuned(tmp_path / "base").train()
    adapter = rx.save(live, tmp_path / "adapter")
    merged = rx.merge(adapter, tmp_path / "merged")
    for reference in (adapter, live):
        assert rx.verify(merged, reference=reference).verdict == "equal"
    assert live.training  # verification used a copy
    other = rx.load(tmp_path / "merged")
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight[0, 0] += 0.1
    assert rx.verify(merged, reference=other).verdict == "differs"
    found = rx.verify(adapter)
    assert found.verdict == "needs rope_extend"
    assert "once it is merged" in found.reason
    with pytest.raises(SystemExit) as error:  # nothing was compared, so a script must not go on
        main(["verify", str(adapter), "--json"])
    assert error.value.code == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"] == "needs rope_extend"
    assert "give its original, or what was merged from it, as --reference" in said.err
    main(["verify", str(adapter), "--reference", str(merged)])
    assert "needs rope_extend" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_window_of_a_million_tokens_takes_a_few_hundred(tmp_path: Path) -> None:
    inputs = verifying.pieces(4096, 1_000_000, 64)
    assert sum(len(ids) for ids, _ in inputs.values()) < 800
    assert max(int(positions.max()) for _, positions in inputs.values()) == 999_999
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    rx.extend(model, 131_072, "ntk")
    found = rx.verify(rx.save(model, tmp_path / "long"))
    assert found.verdict == "equal"
    assert found.inside < 1e-4
    # The larger tolerance at far positions hides nothing: a factor that is 1 % off is found.
    original = rx.load(tmp_path / "long")
    edited(tmp_path / "long", rope_theta=1.01 * original.config.rope_parameters["rope_theta"])
    assert rx.verify(tmp_path / "long", reference=original).verdict == "differs"


@pytest.mark.usefixtures("here")
def test_logits_that_are_not_finite_or_of_another_vocabulary_differ(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[3] = 3e38
        model.model.norm.weight.fill_(1e3)
    assert rx.verify(saved(tmp_path / "infinite", model=model)).verdict == "differs"
    larger = llama()
    larger.resize_token_embeddings(larger.config.vocab_size + 8)
    found = rx.verify(saved(tmp_path / "larger", model=larger), reference=saved(tmp_path / "full"))
    assert found.verdict == "differs"
    assert "its logits have shape" in found.reason


def test_a_reference_without_a_patch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rx.RopeExtendError, match="the reference carries no patch"):
        rx.verify(saved(tmp_path / "full"), reference=llama())


def test_a_process_that_fails_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path / "full")
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no memory')")
    monkeypatch.setattr(stock_reader, "__file__", str(broken))
    with pytest.raises(rx.RopeExtendError, match="the verifying process ended with 1: no memory"):
        rx.verify(directory)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(rx.RopeExtendError, match="the verifying process cannot be run"):
        rx.verify(directory)
