"""`rope-extend doctor`: what is missing is named with what to do, and what is there is not complained of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rope_extend.cli.main import main
from rope_extend.report.machine import OPTIONAL, examine


def test_what_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    findings = {
        finding.subject: finding
        for finding in examine(
            {"HF_HOME": str(tmp_path / "not" / "there"), "HF_HUB_OFFLINE": "1"},
            installed=lambda name: name == "gguf",
            free_disk=lambda path: 10**9,
        )
    }
    assert findings["torch"].result == torch.__version__
    assert "not installed" not in findings["gguf"].result
    for name, (use, command) in OPTIONAL.items():
        if name != "gguf":
            assert use in findings[name].result
            assert command in findings[name].result
    assert str(tmp_path / "not" / "there") in findings["hub cache"].result
    assert "free some space" in findings["hub cache"].advice
    assert "cache" in findings["hub"].advice


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    text = capsys.readouterr().out
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert all(finding["subject"] in text for finding in findings)
    assert sum(line.startswith("!") for line in text.splitlines()) == sum(bool(f["advice"]) for f in findings)
