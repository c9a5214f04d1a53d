"""What a study says to do: use an untrained method, train, or measure what is missing."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Sequence

from rope_extend.advice.advice import READS_ALREADY, Advice
from rope_extend.advice.answer import advise
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.controls import against_cropped, cropped_control
from rope_extend.evaluation.evaluation_config import AS_IS
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.verdicts import verdicts
from rope_extend.report.tables import Sentences, public_name
from rope_extend.study.study_config import StudyConfig
from rope_extend.units import format_length

logger = logging.getLogger(__name__)


def decision(rows: Sequence[EvaluationRow], config: StudyConfig, missing: Sequence[str] = ()) -> Sentences:
    """The verdict on a model, and the next command.

    Args:
        rows: what was measured, with the control whose context is cropped.
        config: the settings of the study.
        missing: labels of the rows of which something is not measured yet; one of them may meet the criteria.
    """
    assert config.target_length is not None
    target = format_length(config.target_length)
    trained = rows[0].trained_length if rows else None
    if trained is not None and config.target_length <= trained:
        said = [f"The model was trained on {format_length(trained)} tokens, so it needs no extension."]
        return Sentences("Verdict", said)
    judged = sorted(verdicts(rows), key=lambda verdict: _ratio(rows, verdict.label))
    good = [verdict for verdict in judged if verdict.success and verdict.label not in missing]
    if good:
        said = [f"Use {good[0].label}. It meets all three criteria at {target}.", str(good[0])]
        said += [f"{verdict.label} meets them too." for verdict in good[1:]]
        return Sentences("Verdict", said)
    if not judged:
        return Sentences("Verdict", [_nothing_judged(rows, config, missing)])
    if missing:
        counted = "1 row is" if len(missing) == 1 else f"{len(missing)} rows are"
        first = f"Not decided yet: {counted} not wholly measured ({', '.join(missing)})."
        whole = [verdict for verdict in judged if verdict.label not in missing]
        if not whole:
            return Sentences("Verdict", [first])
        first += f" The nearest of the others at {target} is {whole[0].label}."
        return Sentences("Verdict", [first, str(whole[0])])
    if not any(math.isfinite(_ratio(rows, verdict.label)) for verdict in judged):
        said = [f"No row has a finite perplexity at {target}: check the weights, and the dtype."]
        return Sentences("Verdict", said)
    undecided = [verdict for verdict in judged if verdict.success is None]
    if undecided:
        first = undecided[0].label
        partly = f"not all of them can be judged for {first}."
        if len(undecided) > 1:
            partly = (
                f"not all of them can be judged for {len(undecided)} rows. The nearest of these is {first}."
            )
        said = [
            f"Not decided yet: no row meets all three criteria at {target}, and {partly}",
            str(undecided[0]),
        ]
        return Sentences("Verdict", said)
    said = [f"No row meets all three criteria at {target}. The nearest is {judged[0].label}.", str(judged[0])]
    return Sentences("Verdict", [*said, *_training(config, rows)])


def _nothing_judged(rows: Sequence[EvaluationRow], config: StudyConfig, missing: Sequence[str]) -> str:
    """Why no row has a verdict."""
    if not config.cropped:
        return "No row can be judged: each is compared with a cropped context, and cropped is off."
    if missing:
        return f"No row can be judged yet: not measured are {', '.join(missing)}."
    if cropped_control(rows) is None:
        return "No row can be judged yet: the control with a cropped context is not measured."
    return "There is nothing to judge, because all rows are controls. Add a method, or an adapter."


def _ratio(rows: Sequence[EvaluationRow], label: str) -> float:
    """The perplexity of a row at the longest length, divided by that of the cropped context.

    Infinite if it is not finite, so that such a row is never the nearest one.
    """
    for comparison in against_cropped(rows):
        if comparison.second.label == label:
            ratio = max(comparison.differences, key=lambda change: change.length).ratio
            return ratio if math.isfinite(ratio) else math.inf
    return math.inf


def _training(config: StudyConfig, rows: Sequence[EvaluationRow]) -> list[str]:
    """What training would take, from the config of the model, or what else to measure."""
    assert config.target_length is not None
    try:
        advice: Advice = advise(config.model, config.target_length, trained_length=config.trained_length)
    except RopeExtendError as error:
        logger.warning("no advice on training: %s", error)
        return []
    if advice.verdict == READS_ALREADY:
        as_is = next((row.label for row in rows if row.encoding is None and row.adapter is None), None)
        if as_is is not None:
            target = format_length(advice.target_length)
            return [f"By its config, the model reads {target} tokens as it is; {as_is} does not show it."]
        return [advice.reason, f"Add {AS_IS} to the methods to measure it."]
    if not advice.recipe:
        return [advice.reason]
    model = shlex.quote(public_name(config.model))
    command = f"rope-extend advise {model} --target-length {format_length(config.target_length)}"
    if config.trained_length is not None:
        command += f" --trained-length {format_length(config.trained_length)}"
    return [f"Train: {command} --gpu GPU --output recipe.yaml writes a recipe.", *_work(advice)]


def _work(advice: Advice) -> list[str]:
    said = []
    if advice.memory is not None:
        said.append(f"A step of it is estimated to need {advice.memory.chosen.total / 1e9:.1f} GB.")
    if advice.work is not None:
        said.append(f"It trains on {advice.work.tokens:,} tokens.")
    return said
