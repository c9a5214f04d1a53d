"""Compare methods on one model, from untrained rows to a verdict: `rope_extend.compare_methods`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluate import measure
from rope_extend.evaluation.evaluation_config import StudyConfig
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.running import Found
from rope_extend.evaluation.verdicts import verdicts
from rope_extend.files import is_private, public_name
from rope_extend.report.tables import Section
from rope_extend.units import format_length


def compare_methods(config: StudyConfig, *, resume: bool = False, overwrite: bool = False) -> Found:
    """Measure a model under several methods, and with adapters, and say what to do.

    Every row is measured on the same documents and prompts: perplexity at every length, passkeys at the
    target, and the control whose context is cropped. Rows advance together, document by document, so the
    report of an interrupted study is worth reading too.

    The directory `config.output` gets the report of `rope_extend.evaluate`, which begins with the verdict,
    and each finished cell. The same call with `resume=True` measures what is missing.

    Args:
        config: what to measure.
        resume: use the finished cells in the output directory.
        overwrite: delete the study in the output directory, once the model is loaded.

    Returns:
        The `rows`, what is `missing`, and the verdict as the first section of `lead`.

    Raises:
        RopeExtendError: as `evaluate`.
    """
    if config.output is None or (config.data is None and not config.tasks):
        raise RopeExtendError("a report needs data and output; give long documents, and a directory")

    def verdict(found: Found) -> Section:
        return decision(found.rows, config, found.unfinished)

    found = measure(config, resume=resume, overwrite=overwrite, lead=verdict)
    own = decision(found.rows, config, found.unfinished, model=config.model)
    return replace(found, lead=[own, *found.lead[1:]])


def decision(
    rows: Sequence[EvaluationRow], config: StudyConfig, missing: Sequence[str] = (), model: str | None = None
) -> Section:
    """The verdict on a model, and the next command.

    Args:
        rows: what was measured, with the control whose context is cropped.
        config: the settings of the study.
        missing: labels of the rows of which something is not measured yet; one of them may meet the criteria.
        model: name of the model in the command; by default one for texts that people publish.
    """
    public = f"path/to/{public_name(config.model)}" if is_private(config.model) else config.model
    return Section("Verdict", notes=_decided(rows, config, missing, model or public))


def _decided(
    rows: Sequence[EvaluationRow], config: StudyConfig, missing: Sequence[str], model: str
) -> list[str]:
    assert config.target_length is not None
    target = format_length(config.target_length)
    trained = rows[0].trained_length if rows else None
    if trained is not None and config.target_length <= trained:
        return [f"The model was trained on {format_length(trained)} tokens, so it needs no extension."]
    ppl = {row.label: row.result.ppl[row.result.max_length] for row in rows if row.result}
    finite = {label for label, value in ppl.items() if math.isfinite(value)}
    judged = sorted(verdicts(rows), key=lambda each: ppl[each.label] if each.label in finite else math.inf)
    whole = [verdict for verdict in judged if verdict.label not in missing]
    good = [verdict for verdict in whole if verdict.success]
    if good:
        said = [f"Use {good[0].label}. It meets all three criteria at {target}.", str(good[0])]
        return [*said, *(f"{verdict.label} meets them too." for verdict in good[1:])]
    if judged and not missing and not any(verdict.label in finite for verdict in judged):
        those = "extended row" if finite else "row"
        return [f"No {those} has a finite perplexity at {target}: check the weights, and the dtype."]
    undecided, more = [verdict for verdict in whole if verdict.success is None], list[str]()
    if missing:
        first = f"Not decided yet: not wholly measured are {', '.join(missing)}."
    elif not ppl:
        first = "No row can be judged: no perplexity was measured; give long documents (--data)."
    elif not judged:
        first = "No row can be judged: all are controls, or the control with a cropped context is missing."
    elif undecided:
        first = f"Not decided yet: no row meets all three criteria at {target}, and not all were measured."
    else:
        command = f"rope-extend advise {shlex.quote(model)} --target-length {target}"
        if config.trained_length is not None:
            command += f" --trained-length {format_length(config.trained_length)}"
        first = f"No row meets all three criteria at {target}."
        more = [f"{command} --gpu GPU --output recipe.yaml says what training takes, and writes a recipe."]
    return [first, *(f"The nearest is {verdict}" for verdict in (undecided or whole)[:1]), *more]
