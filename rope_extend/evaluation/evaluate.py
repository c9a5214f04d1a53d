"""Measure a model under several methods and with adapters: `evaluate`, `retrieve` and `compare_methods`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from rope_extend.data.blocks import control_flags
from rope_extend.data.sources import check_outside
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import (
    EvaluationConfig,
    ModelConfig,
    RetrievalConfig,
    StudyConfig,
)
from rope_extend.evaluation.labels import from_here
from rope_extend.evaluation.measurement import Measurement, counted_by_row
from rope_extend.evaluation.output_directory import check_measurement
from rope_extend.evaluation.past_training import (
    TRAIN_THE_SHORTER,
    Ending,
    difference,
    progress_of,
    reason_for_doubt,
    settings_of,
    unfinished,
)
from rope_extend.evaluation.report_files import write_report
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.running import Measured, run
from rope_extend.evaluation.verdicts import Decision, decide
from rope_extend.files import is_private, public_name
from rope_extend.journal import only_writer
from rope_extend.models.checkpoint_directory import is_adapter
from rope_extend.models.processes import is_main_process, processes
from rope_extend.report.page import Part
from rope_extend.report.tables import Code, Section
from rope_extend.units import format_length

FELL = {True: "so it still fell", False: "so it is level", None: "too noisy to say whether it fell"}


def evaluate(
    config: EvaluationConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> list[EvaluationRow]:
    """Measure perplexity with each method, untrained, and with each adapter; write the report.

    Every row is measured on the same tokens. Methods extend the model to the longest length. Everything is
    checked before the weights are loaded. Under `torchrun` or `accelerate launch` each process measures its
    share of the documents, all processes get the same rows, and one of them writes the report.

    If `config.output` is set, the report goes there: `results.jsonl`, tables, pictures and `report.html`.
    What is finished is kept there too, so an evaluation can be resumed, and get more rows or documents.

    Args:
        config: what to measure, and how.
        resume: use what is measured in the output directory.
        overwrite: replace what is measured in the output directory.
        progress: show progress.

    Returns:
        The rows of the table, on the documents that they share.

    Raises:
        RopeExtendError: no such model, adapter, method or data, texts that are too short, a length that does
            not fit into memory, or an output directory that holds a report.
    """
    if config.data is None:
        raise RopeExtendError("evaluation: data is not set; give long documents to measure perplexity on")
    return measure(config, resume=resume, overwrite=overwrite, progress=progress).rows


def retrieve(
    config: RetrievalConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> list[EvaluationRow]:
    """Measure retrieval with each method, untrained, and with each adapter; write the report.

    Every row answers the same prompts, and has its `retrieval`. The report also has `prompts.jsonl`. A task
    that does not fit a length is refused. All else is as for `evaluate`.
    """
    return measure(config, resume=resume, overwrite=overwrite, progress=progress).rows


def compare_methods(config: StudyConfig, *, resume: bool = False, overwrite: bool = False) -> Measured:
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
    return measure(config, resume=resume, overwrite=overwrite)


def measure(
    config: ModelConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> Measured:
    """Measure everything that the settings ask for, and write the report.

    No other process may write to the directory until the report is there. Errors are those of `evaluate`.
    """
    if (resume or overwrite) and config.output is None:
        raise RopeExtendError(
            "resume and overwrite refer to a report on disk, and output is not set; set output"
        )
    directory = None
    if config.output is not None:
        directory = check_measurement(config.output, overwrite=overwrite, resume=resume)
        check_outside(directory, config.data)
    measurement = Measurement(config, progress=progress)
    if connected := processes(measurement.candidates.load_options.torch_device):
        connected.wait_for_everyone()  # no process changes the directory before all have checked it
    with ExitStack() as stack:
        if directory is not None and is_main_process():
            stack.enter_context(only_writer(directory, "measurement"))
            # Another one may have ended by now.
            check_measurement(directory, overwrite=overwrite, resume=resume)
        measured = run(measurement, directory, resume=resume, overwrite=overwrite, progress=progress)
        doubts = {
            row.label: reason_for_doubt(row.adapter, control, config.data, config.split)
            for row in measured.rows
            if row.adapter and (control := _trained_control(row, measured.rows)) != row.adapter
        }
        ends = {end.fell for row in measured.rows if row.is_extended and (end := _ending(row))}
        fell = True in ends or (False if ends == {False} else None)
        decision = decide(measured.rows, measured.unfinished, doubts, fell)
        names = ", ".join(Path(document.name).name for document in measurement.documents)
        first = "All" if len(measurement.documents) < (config.max_documents or math.inf) else "The first"
        documents = Section("Documents", notes=[f"{first} that are long enough, by path: {names}."])
        asked = Section("Passkeys", notes=["Asked in lines like code, as in the pretraining of this model."])
        own_form = getattr(measurement.tasks.get("passkey"), "template", "") == "demo"
        if directory is not None and measured.rows and is_main_process():
            try:
                write_report(
                    measured.rows, directory, overwrite=overwrite or resume, prompts=measurement.prompts,
                    lead=_lead(config, measured, decision, _public_path),
                    end=[*([documents] if names else []), *[asked] * own_form, how_it_was_made(config)],
                )  # fmt: skip
            except OSError as error:
                raise RopeExtendError(
                    f"cannot write the report to {str(directory)!r}: {error}; free space on the disk, "
                    "and give resume=True: what is measured is kept"
                ) from error
    return replace(measured, lead=_lead(config, measured, decision, str))


def _public_path(name: str) -> str:
    return f"path/to/{public_name(name)}" if is_private(name) else name


def _lead(
    config: ModelConfig, measured: Measured, decision: Decision, shown: Callable[[str], str]
) -> list[Part]:
    """What a report begins with: the verdict, the next command with paths as `shown`, what is missing."""
    parts = list[Part]()
    if decision.verdicts or isinstance(config, StudyConfig):
        parts.append(decision.section)
    if decision.train and isinstance(config, StudyConfig):
        assert config.target_length is not None
        target = format_length(config.target_length)
        command = ["rope-extend", "advise", shown(config.model), "--train", "--target-length", target]
        if config.trained_length is not None:
            command += ["--trained-length", format_length(config.trained_length)]
        text = shlex.join(
            [*command, "--data", "path/to/other/documents", "--output", f"recipe-{target}.yaml"]
        )
        heading = "To train: this estimates time and memory on an H100 (--gpu), and writes a recipe"
        parts.append(Code(heading, text))
    parts += _training_notes(measured.rows)
    undecided = [each.label for each in decision.verdicts if each.alone and each.whole]
    for row in (
        row for row in measured.rows if row.label in undecided and not _trained_control(row, measured.rows)
    ):
        if is_adapter(Path(f"{row.adapter}-control")):
            its_own = shown(f"{row.adapter}-control")
            parts.append(
                Section("Next", notes=[f"Give the control of {row.label} to this command too: {its_own}"])
            )
            continue
        train = _control_command(row, shown)
        heading = f"Next: train a control of {row.label}, and give both adapters to this command"
        heading += ". In place of ..., what its training had" if "..." in train else ""
        parts.append(Code(heading, train))
    found = any(each.success for each in decision.verdicts)
    failed = [
        each.label
        for each in decision.verdicts
        if each.whole
        and not (found or (each.gain.met and each.cost.met))
        and (not each.doubt or each.doubt.endswith(TRAIN_THE_SHORTER))
    ]
    for row in (row for row in measured.rows if row.label in failed and row.adapter):
        if (end := _ending(row)) and end.fell is False:
            continue
        if (control := _trained_control(row, measured.rows)) and (
            lines := _longer(row.adapter, control, shown)
        ):
            again = f"--resume --documents {row.result.documents}"
            parts.append(Code(f"To train longer; then the command of this report again, with {again}", lines))
            break
    if measured.missing:
        parts.append(Section("Not measured yet", notes=counted_by_row(measured.missing)))
    return parts


def _trained_control(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> str | None:
    """The adapter of the control of a row, if that was trained."""
    control = row.control_in(rows)
    return None if control is None else control.adapter


def _training_notes(rows: Sequence[EvaluationRow]) -> list[Part]:
    """What of the training of adapters makes a comparison unfair, as far as their files say."""
    notes = list[str]()
    for row in (row for row in rows if row.adapter and not row.cropped):
        if stopped := unfinished(str(row.adapter)):
            notes.append(f"The training of {row.label} {stopped}.")
        elif (progress := progress_of(str(row.adapter))).tokens:
            loss = ""
            if end := progress.ending:
                loss = (
                    f"; its loss was {end.third:.3f} in the third quarter of the steps, then {end.last:.3f}, "
                )
                loss += FELL[end.fell]
            notes.append(f"{row.label} was trained on {progress.tokens:,} tokens{loss}.")
        if (control := _trained_control(row, rows)) and (differs := difference(str(row.adapter), control)):
            notes.append(f"{differs[0].upper()}{differs[1:]}.")
    return [Section("Training", notes=notes)] if notes else []


def _ending(row: EvaluationRow) -> Ending | None:
    """How the losses of a row's training end, as far as its files say."""
    return progress_of(row.adapter).ending if row.adapter else None


def _longer(adapter: str | None, control: str, shown: Callable[[str], str]) -> str:
    """The commands that train an adapter and its control on twice as many tokens; empty without recipes."""
    lines, runs = list[str](), {run: progress_of(run).tokens for run in (str(adapter), control)}
    most = 2 * max(runs.values())
    for trained, tokens in runs.items():
        if tokens and (steps := settings_of(trained, "recipe.yaml").get("steps")):
            file, output = shlex.quote(f"{shown(trained)}/recipe.yaml"), shlex.quote(shown(trained))
            more = f"--resume --steps {round(steps * most / tokens)}"
            lines.append(f"rope-extend finetune {file} --output {output} {more}")
    return "\n".join(lines) if len(lines) == 2 else ""


def _control_command(row: EvaluationRow, shown: Callable[[str], str]) -> str:
    """The command that trains plain RoPE within the old window, on as many tokens as an adapter.

    The settings are those of the adapter's recipe; without one, they are for the user to fill in.
    """
    adapter, window = str(row.adapter), row.trained_length or 0
    output = f"--output {shlex.quote(f'{shown(adapter)}-control')}"
    with suppress(ValueError, LookupError, TypeError, ZeroDivisionError):  # a recipe changed by hand
        recipe = settings_of(adapter, "recipe.yaml")
        own = math.prod(recipe[name] for name in ("steps", "batch_size", "gradient_accumulation"))
        own *= recipe["block_length"] or recipe["target_length"]
        times = round(progress_of(adapter).tokens / own)  # of several processes
        recipe["gradient_accumulation"] *= max(1, times)
        if changes := control_flags(recipe, window):
            return f"rope-extend finetune {shlex.quote(f'{shown(adapter)}/recipe.yaml')} {changes} {output}"
    flags = f"--method none --target-length {window} --trained-length {window} --block-length {window} "
    flags += " ".join(f"--{name} ..." for name in ("data", "steps", "learning-rate", "lora-targets"))
    return f"rope-extend finetune {shlex.quote(shown(row.model))} {flags} {output}"


def how_it_was_made(config: ModelConfig) -> Code:
    """The last part of a report: the settings that made it, as YAML for the same command.

    Reports are published, so of a path outside the working directory only the last part is shown.
    """

    def public(value: Any) -> Any:
        return [*map(public, value)] if isinstance(value, list) else public_name(from_here(value))

    values = config.to_dict()
    changed = {
        each.name: values[each.name] for each in fields(config) if getattr(config, each.name) != each.default
    }
    named = {"model", "adapters", "methods", "data", "output"}
    shown = {name: public(value) if name in named and value else value for name, value in changed.items()}
    note = "" if shown == changed else "# Write paths in full: only their last parts are shown.\n"
    file = note + yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip("\n")
    return Code("The settings that made this report", f"# rope-extend {config.command} settings.yaml\n{file}")
