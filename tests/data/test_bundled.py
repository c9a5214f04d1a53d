"""The texts that the demonstration model is fine-tuned and evaluated on."""

import hashlib

import pytest

from rope_extend.data import bundled
from rope_extend.errors import RopeExtendError


def test_the_split_depends_on_the_paths_alone() -> None:
    """So it is the same on every machine, and both parts are disjoint."""
    root = bundled.standard_library_dir()
    tuning, evaluation = (
        [path.relative_to(root) for path in files]
        for files in (bundled.finetuning_files(), bundled.evaluation_files())
    )
    for files, expected in ((tuning, True), (evaluation, False)):
        assert files == sorted(files)
        for path in files:
            share = int(hashlib.sha256(path.as_posix().encode()).hexdigest()[:13], 16) / 16**13
            assert (share < 0.6) == expected
            assert (root / path).stat().st_size >= bundled.MIN_CHARACTERS
            assert not {"test", "idlelib", "site-packages", "encodings", "pydoc_data"} & set(path.parts)
    assert 0.5 < len(tuning) / (len(tuning) + len(evaluation)) < 0.7
    assert len(evaluation) >= 30


def test_missing_standard_library_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    with pytest.raises(RopeExtendError, match="no source files of the Python standard library"):
        bundled.evaluation_files()
