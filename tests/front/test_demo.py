"""The demonstration, end to end on the bundled model, and what it must show."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from rope_extend.cli.main import main
from rope_extend.demo import run as demo
from rope_extend.demo.run import DOCUMENTS, run_demo
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import regressions
from rope_extend.evaluation.report_files import read_results
from rope_extend.training.recipe import Recipe


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_demonstration_resumes_or_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """Old results are gone once it starts again: they would be shown as those of the new runs."""
    (tmp_path / "results.jsonl").touch()
    (tmp_path / "runs" / "yarn").mkdir(parents=True)
    (tmp_path / "runs" / "yarn" / "recipe.yaml").touch()
    runs: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(
        demo, "finetune", lambda recipe, resume: runs.append((recipe.method, recipe.steps, resume))
    )

    def evaluate(_: object, **asked: bool) -> None:
        assert asked == {"resume": not overwrite, "overwrite": overwrite}
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, tuned=["yarn"], steps=5, overwrite=overwrite)
    assert (tmp_path / "results.jsonl").exists() != overwrite
    assert runs == [("yarn", 5, not overwrite), ("none", 5, False)]


def test_unknown_methods_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for wrong in ({"methods": ["yran"]}, {"tuned": ["yran"]}):
        with pytest.raises(RopeExtendError, match="Did you mean 'yarn'"):
            run_demo(tmp_path / "demo", **wrong)
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_the_demo_shows_what_it_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The project's promise, on the whole demonstration, and the files that it writes."""
    main(["demo", "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    measured = read_results(tmp_path)
    assert [row.label for row in measured] == [
        "none", "none, cropped to 256", "yarn", "yarn + LoRA", "short_original(yarn) + LoRA",
        "none + LoRA at 256",
        "none + LoRA at 256, cropped to 256",
    ]  # fmt: skip
    # What the extension gives, compared with controls, and what it costs.
    rows = {row.label: row.result for row in measured}
    plain, trained, longest = rows["none"], 256, 2048
    assert plain.documents == DOCUMENTS
    assert plain.ppl[longest] >= 3 * plain.ppl[trained]
    tuned = rows["yarn + LoRA"]
    assert tuned.ppl[longest] < plain.ppl[trained]
    lengths = sorted(length for length in tuned.ppl if length >= trained)
    for shorter, longer in itertools.pairwise(lengths):
        assert tuned.ppl[longer] <= tuned.ppl[shorter]
    # More context helps: better than the same tokens of training spent in the old window.
    gains = tuned.against(rows["none + LoRA at 256, cropped to 256"])
    assert gains[-1].length == longest
    assert gains[-1].ratio < 1
    # A short run keeps passkeys of the old window. After 36 steps, fewer than half are found.
    by_label = {pair.second.label: pair for pair in regressions(measured)}
    ((_, _, found),) = by_label["yarn + LoRA"].changes
    assert found.second.mean >= 0.7
    # Short texts in training keep more of the perplexity.
    assert by_label["short_original(yarn) + LoRA"].longest.nats < by_label["yarn + LoRA"].longest.nats
    # The runs with their cards, the table, and what is printed.
    assert shown.count("$ rope-extend finetune") == 3
    assert shown.count("$ rope-extend evaluate") == 1
    assert shown.count("$ rope-extend card") == 3
    for name, mixed in {"yarn": False, "short_original-yarn": True, "control": False}.items():
        assert Recipe.from_yaml(tmp_path / "runs" / name / "recipe.yaml").mixed_windows == mixed
        card = (tmp_path / "runs" / name / "README.md").read_text()
        assert "Not measured yet" not in card
        assert "| yarn + LoRA" in card
    table = (tmp_path / "report.md").read_text()
    assert re.search(r"Retrieval, passkey:\n\n\| +\| +256 \| +2k \|", table)
    assert "# rope-extend evaluate settings.yaml" in table
