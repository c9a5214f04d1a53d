"""Names of models: what the hub answers becomes one clear error, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

from rope_extend.errors import RopeExtendError
from rope_extend.models.locating import check_checkpoint

RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=401)
LATE = """
import sys
from rope_extend.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as error:
    print(error.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (GatedRepoError("", response=RESPONSE), None),
        (RepositoryNotFoundError("", response=RESPONSE), "no model of that name on the hub"),
        (ConnectionError(), r"cannot be asked .* \(ConnectionError\)\. Check the path, or the network"),
        (EntryNotFoundError(""), None),
    ],
    ids=["gated", "missing", "no network", "without a config"],
)
@pytest.mark.usefixtures("private_cache")
def test_the_answer_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, message: str | None
) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise answer

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    if message is None:
        check_checkpoint("owner/name")
        return
    with pytest.raises(RopeExtendError, match=message):
        check_checkpoint("owner/name")


@pytest.mark.parametrize("name", ["-1", "owner/a--b", "name..x", "m" * 97])
def test_a_name_that_the_hub_does_not_allow_is_one_error(name: str) -> None:
    with pytest.raises(RopeExtendError, match=r"no directory .* no model of that name"):
        check_checkpoint(name)


@pytest.mark.parametrize(
    "command", ["finetune llama_7b_32k_yarn --plan", "search owner/name --target-length 32k --plan"]
)
def test_a_model_that_cannot_be_reached_is_an_error_before_torch_is_imported(command: str) -> None:
    words = [sys.executable, "-c", LATE, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "the hub cannot be asked" in done.stderr
