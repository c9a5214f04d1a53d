"""What is uploaded to the hub: a checkpoint that loads, without local paths. The hub is a stand-in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
from integrity import flip, logits, rewritten
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.errors import RopeExtendError


class Hub:
    """Copies what is uploaded into a directory, by the rules of `upload_folder`."""

    directory: Path
    calls: ClassVar[list[tuple[str, Any]]]
    public: ClassVar[bool] = False

    def __init__(self, token: str | None = None) -> None:
        Hub.calls.append(("token", token))

    def create_repo(self, repo_id: str, **options: Any) -> None:
        if "/" not in repo_id:
            raise ValueError("no owner")
        Hub.calls.append((repo_id, options))

    def repo_info(self, repo_id: str) -> Any:
        return type("Info", (), {"private": not Hub.public})

    def list_repo_files(self, repo_id: str, revision: str | None) -> list[str]:
        return [path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*")]

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], delete_patterns: list[str],
        **options: Any,
    ) -> Any:  # fmt: skip
        Hub.calls.append((repo_id, options))
        there = self.list_repo_files(repo_id, None)
        for name in huggingface_hub.utils.filter_repo_objects(there, allow_patterns=delete_patterns):
            (self.directory / name).unlink()
        files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        chosen = huggingface_hub.utils.filter_repo_objects(
            [path.relative_to(folder_path).as_posix() for path in files], allow_patterns=allow_patterns
        )
        for name in chosen:
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder_path) / name, self.directory / name)
        return type("Commit", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Hub.directory, Hub.calls = tmp_path / "hub", []
    Hub.directory.mkdir()
    monkeypatch.setattr(Hub, "public", False)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return Hub.directory


@pytest.mark.parametrize("directory", ["full"], indirect=True)
def test_what_is_uploaded_loads_and_the_users_own_files_stay_here_and_are_named(
    directory: Path, hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    own = ["credentials.json", "face.png", "notes.txt", "old.safetensors", "recipe.yaml", "settings.json"]
    sent = ["README.md", "LICENSE", "NOTICE.txt", "perplexity.png", "chat_template.jinja"]
    before = {path.name for path in directory.iterdir()}
    for name in (*own, *sent):
        (directory / name).write_text("{}")
    (directory / "README.md").write_text("# A card\n\n![Perplexity](perplexity.png)\n![](../outside.png)\n")
    (directory / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    (directory / "checkpoints" / "checkpoint-2" / "config.json").write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    (directory / "NOTICE.link").symlink_to(tmp_path / "secret.json")
    with caplog.at_level("INFO", "rope_extend"):
        main(["push", str(directory), "owner/name", "--private"])
    assert "https://hub/owner/name/commit/1" in capsys.readouterr().out
    assert {path.relative_to(hub).as_posix() for path in hub.rglob("*")} == before | set(sent)
    left = sorted([*own, "checkpoints", "NOTICE.link"])
    assert f"not uploaded from {directory}: {', '.join(left)}" in caplog.text
    assert ("owner/name", {"private": True, "exist_ok": True}) in Hub.calls
    assert torch.equal(logits(rx.load(hub)), logits(rx.load(directory)))


@pytest.mark.parametrize(
    ("first", "second"), [("sharded", "full"), ("adapter", "merged"), ("full", "adapter")]
)
def test_what_a_repository_held_of_another_model_is_replaced_and_nothing_else(
    checkpoints: Path, hub: Path, tmp_path: Path, first: str, second: str
) -> None:
    """Stock loaders would put the former adapter on the merge, prefer an index of shards to one file, and use
    the chat template of another tokenizer."""
    rx.merge(checkpoints / "adapter", tmp_path / "merged")
    own = {"results.png", "notes.json", "onnx/model.safetensors", "model-old.safetensors"}
    (hub / "onnx").mkdir()
    for name in own:
        (hub / name).write_text("{}")
    for name in (first, second):
        source = Path(
            shutil.copytree((tmp_path if name == "merged" else checkpoints) / name, tmp_path / "push")
        )
        for config in {"adapter_config.json", "rope_extend.json"} & {path.name for path in source.iterdir()}:
            text = (source / config).read_text()
            (source / config).write_text(text.replace(str(checkpoints / "base"), "owner/base"))
        for tokenizer in ("vocab.json", "chat_template.jinja") if name == first else ("tokenizer.json",):
            (source / tokenizer).write_text("{}")
        rx.push_to_hub(source, "owner/name")
        shutil.rmtree(source)
    there = {path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()}
    pushed = {path.name for path in ((tmp_path if second == "merged" else checkpoints) / second).iterdir()}
    assert there == pushed | own | {"tokenizer.json"}
    base = {"base_model": str(checkpoints / "base")} if second == "adapter" else {}
    (hub / "model-old.safetensors").unlink()
    expected = logits(rx.load(checkpoints / ("adapter" if second == "merged" else second)))
    assert_same_but_rounding(logits(rx.load(hub, **base)), expected)
    if second != "adapter":
        assert_same_but_rounding(logits(AutoModelForCausalLM.from_pretrained(hub)), expected)


@pytest.mark.parametrize("directory", ["adapter"], indirect=True)
def test_a_local_base_model_is_refused(directory: Path, hub: Path) -> None:
    with pytest.raises(RopeExtendError, match=r"names a local path in base_model_name_or_path.*hub id"):
        rx.push_to_hub(directory, "owner/name")
    assert not Hub.calls  # nothing was created
    for name, field in (
        ("adapter_config.json", "base_model_name_or_path"),
        ("rope_extend.json", "base_model"),
    ):
        rewritten(directory / name, lambda data, field=field: {**data, field: "owner/base"})
    rx.push_to_hub(directory, "owner/name", token="t", revision="next")
    assert {"adapter_config.json", "adapter_model.safetensors", "rope_extend.json"} <= {
        path.name for path in hub.iterdir()
    }
    assert Hub.calls[0] == ("token", "t")
    assert Hub.calls[-1][1]["revision"] == "next"


@pytest.mark.parametrize("directory", ["full"], indirect=True)
def test_mistakes_are_explained_and_nothing_is_uploaded(
    directory: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(RopeExtendError, match="the hub did not take 'name': no owner"):
        rx.push_to_hub(directory, "name")
    monkeypatch.setattr(Hub, "public", True)
    with pytest.raises(SystemExit):
        main(["push", str(directory), "owner/name", "--private"])
    assert "error: owner/name exists and is public, so --private cannot hold" in capsys.readouterr().err
    theirs = hub / "model-00001-of-00002.safetensors"
    theirs.write_text("of the base model")
    with pytest.raises(RopeExtendError, match=r"holds a model that rope_extend did not upload \(model-00001"):
        rx.push_to_hub(directory, "owner/base")
    assert theirs.read_text() == "of the base model"
    theirs.unlink()
    assert not any(hub.iterdir())
    main(["push", str(directory), "owner/name"])  # a public one, if nobody asked for a private one
    shutil.rmtree(hub)
    hub.mkdir()
    flip(directory / "model.safetensors")
    with pytest.raises(RopeExtendError, match=r"model\.safetensors"):
        rx.push_to_hub(directory, "owner/name")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RopeExtendError, match=r"no rope_extend\.json"):
        rx.push_to_hub(tmp_path / "empty", "owner/name")
    assert not any(hub.iterdir())


@pytest.mark.parametrize("directory", ["full"], indirect=True)
def test_without_a_network_the_error_says_so(directory: Path) -> None:
    """The hub's own client, with an address at which nobody listens."""
    from huggingface_hub import HfApi

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.HfApi", lambda token: HfApi("http://127.0.0.1:9", token="hf_none"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(RopeExtendError, match=r"the hub did not take .*refused"):
            rx.push_to_hub(directory, "owner/name")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(RopeExtendError, match=r"the hub did not take .*offline"):
            rx.push_to_hub(directory, "owner/name")
