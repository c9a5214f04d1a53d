"""Saved encodings: their path is taken wherever a method's name is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import FACTOR, TARGET, TRAINED, tiny_llama

import rope_extend as rx
from rope_extend.encodings import LongRoPE, SavedEncoding, YaRN, method_named, rotary_method
from rope_extend.method_names import check_method_name

SHAPE = rx.RopeShape(16, 1e4, TRAINED)
TABLE = LongRoPE(FACTOR, long_factor=(1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 9.0), attention_scale=1.1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    SavedEncoding(TABLE, SHAPE, TARGET).write(tmp_path / "encoding.json")
    return tmp_path


def test_directory_and_file_give_the_encoding(saved: Path) -> None:
    for name in (str(saved), str(saved / "encoding.json")):
        assert rx.encoding(name) == TABLE
        assert method_named(name).for_target(SHAPE, TARGET) == TABLE
        assert rotary_method(name).for_target(SHAPE, TARGET // 2) == TABLE
        check_method_name(name)
        check_method_name(f"short_original({name})")


def test_extend_and_recipes_take_the_directory(saved: Path) -> None:
    model = tiny_llama()
    shape = rx.extend(model, TARGET, "yarn").shape
    SavedEncoding(TABLE, shape, TARGET).write(saved / "encoding.json")
    rx.current_patch(model).remove()
    with rx.extend(model, TARGET, str(saved)) as patch:
        assert patch.encoding == TABLE
    recipe = rx.Recipe(model="m/m", data="d", output_dir="o", target_length=TARGET, method=str(saved))
    assert recipe.method == str(saved)
    with pytest.raises(rx.RopeExtendError, match="unknown parameter 'beta_fast'"):
        rx.Recipe(
            model="m/m", data="d", output_dir="o", target_length=TARGET, method=str(saved),
            method_parameters={"beta_fast": 2},
        )  # fmt: skip


def test_another_model_and_a_longer_window_are_refused(saved: Path) -> None:
    method = method_named(str(saved))
    with pytest.raises(rx.RopeExtendError, match="belongs to another model"):
        method.for_target(rx.RopeShape(16, 5e5, TRAINED), TARGET)
    with pytest.raises(rx.RopeExtendError, match=r"is for 256 tokens, got 257"):
        method.for_target(SHAPE, TARGET + 1)
    with pytest.raises(rx.RopeExtendError, match="takes no parameters"):
        rx.encoding(str(saved), factor=2.0)


@pytest.mark.parametrize(
    "content",
    [
        "", "[1]", "{}", '{"encoding": {"name": "yarn", "factor": 2}}', '{"encoding": 1, "shape": 2}',
        "\udcff", "[" * 100_000,
    ],
    ids=range(7),
)  # fmt: skip
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "encoding.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    for make in (rx.encoding, method_named, rotary_method):
        with pytest.raises(rx.RopeExtendError, match="is not the file of a saved encoding"):
            make(str(tmp_path))


def test_a_path_may_have_spaces(saved: Path) -> None:
    directory = saved / "my  enc"
    directory.mkdir()
    SavedEncoding(TABLE, SHAPE, TARGET).write(directory / "encoding.json")
    for name in (f"resonance({directory})", f" resonance ( {directory} ) "):
        composed = rotary_method(name).for_target(SHAPE, TARGET)
        assert composed == rx.encoding("resonance", inner=TABLE)
        check_method_name(name)
    assert rotary_method(" resonance( short_original (yarn ) ) ") == rotary_method(
        "resonance(short_original(yarn))"
    )


def test_no_file_is_one_clear_error(tmp_path: Path) -> None:
    for make in (rx.encoding, method_named, rotary_method, check_method_name):
        with pytest.raises(rx.RopeExtendError, match="no saved encoding at"):
            make(str(tmp_path / "nothing"))


def test_a_record_cannot_name_a_file(saved: Path) -> None:
    """Also not itself, which would never end."""
    values = json.loads((saved / "encoding.json").read_text())
    (saved / "encoding.json").write_text(json.dumps({**values, "encoding": {"name": str(saved)}}))
    with pytest.raises(rx.RopeExtendError, match="no encoding is named"):
        rx.encoding(str(saved))
    with pytest.raises(rx.RopeExtendError, match="no encoding is named"):
        rx.Encoding.from_dict({"name": str(saved)})


def test_a_directory_does_not_hide_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yarn").mkdir()
    SavedEncoding(TABLE, SHAPE, TARGET).write(tmp_path / "yarn" / "encoding.json")
    assert rx.encoding("yarn", factor=4.0) == YaRN(4.0)
    assert rotary_method("yarn").for_target(SHAPE, TARGET) == YaRN(FACTOR)
    assert torch.equal(rx.encoding("./yarn").inv_freq(SHAPE), TABLE.inv_freq(SHAPE))
