"""Completion scripts know commands, flags and values; bash completes with them, without Python."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from rope_extend.cli.completion import SHELLS
from rope_extend.cli.main import main


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_knows_a_command_a_flag_and_a_value(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    script = capsys.readouterr().out
    for word in ("finetune", "target-length", "self_extend", "llama3_8b_32k_yarn"):
        assert word in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    for line, expected in {
        "rope-extend eva": ["evaluate"],
        "rope-extend finetune --target": ["--target-length"],
        "rope-extend finetune --method dynamic_y": ["dynamic_yarn"],
        "rope-extend generate m --quantize ": ["4bit", "8bit"],
        "rope-extend recipes co": ["copy"],
        "rope-extend recipes show llama3_8b_32k": ["llama3_8b_32k_yarn"],
        "rope-extend evaluate m --methods self": ["self_extend"],
        "rope-extend plot heat": ["heat-map"],
        "rope-extend export x --to s": ["sglang"],
        "rope-extend advise x --gpu rtx-4": ["rtx-4090"],
    }.items():
        words = line.split(" ")
        code = (
            f"{script}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))})\nCOMP_CWORD={len(words) - 1}\n"
            '_shtab_rope_extend\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        done = subprocess.run(["bash", "-c", code], check=True, capture_output=True, text=True)
        assert done.stdout.split() == expected, line
