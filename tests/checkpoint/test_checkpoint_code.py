"""No code of a checkpoint is ever run."""

from __future__ import annotations

import ast
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from integrity import extended, rewritten, unsealed

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.card import write_card
from rope_extend.checkpoint.exporting import export
from rope_extend.cli.main import main

KEY = "trust_remote_code"


def test_trust_remote_code_is_never_true() -> None:
    """In the source, every argument, key and default of that name is False."""
    root, said = Path(rx.__file__).parents[1], 0
    for name in ("rope_extend", "patches", "scripts", "tools"):
        for path in sorted(root.glob(f"{name}/**/*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                values: list[Any] = []
                if isinstance(node, ast.keyword) and node.arg == KEY:
                    values = [node.value]
                elif isinstance(node, ast.Assign):
                    values = [node.value for target in node.targets if KEY in ast.unparse(target)]
                elif isinstance(node, ast.Dict):
                    keyed = zip(node.keys, node.values, strict=True)
                    values = [value for key, value in keyed if getattr(key, "value", None) == KEY]
                elif isinstance(node, ast.Name | ast.arg):
                    assert "remote_code" not in ast.unparse(node), f"{path}:{node.lineno}"
                for value in values:
                    said += 1
                    assert ast.unparse(value) == "False", f"{path}:{value.lineno}"
    assert said >= 2


@pytest.mark.usefixtures("checkpoints")
def test_code_in_a_checkpoint_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    where, ran = tmp_path / "hostile", tmp_path / "ran"
    rx.save(extended(), where)
    (where / "hostile.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\n")

    def hostile(data: dict[str, Any]) -> None:
        data["model_type"] = "hostile"
        data["auto_map"] = {"AutoConfig": "hostile.C", "AutoModelForCausalLM": "hostile.C"}

    rewritten(where / "config.json", hostile)
    unsealed(where)
    trusting, exporting = partial(rx.load, trust_remote_code=True), partial(export, output=tmp_path / "out")
    for read in (rx.load, trusting, rx.info, exporting, rx.verify):
        with pytest.raises(RopeExtendError):
            read(str(where))
    with pytest.raises(SystemExit):
        main(["info", str(where)])
    write_card(str(where))  # of the record alone
    assert not ran.exists()
    assert capsys.readouterr().err.startswith("rope-extend: error: ")


def test_a_tokenizer_s_code_is_not_run(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    adapter, ran = Path(shutil.copytree(checkpoints / "adapter", tmp_path / "adapter")), tmp_path / "ran"
    (adapter / "hostile.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\n")
    (adapter / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "C", "auto_map": {"AutoTokenizer": ["hostile.C", None]}})
    )
    with pytest.raises(RopeExtendError):
        rx.merge(adapter, tmp_path / "merged")
    assert not ran.exists()
    assert not (tmp_path / "merged").exists()
