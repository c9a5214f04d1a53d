"""Advice for one model and one window: whether to train, with which method, on what, and for how long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from shlex import quote
from typing import Any

from transformers import AutoConfig

from rope_extend.advice.advice import (
    CRITERIA,
    DOES_NOT_FIT,
    FINETUNE,
    LOCAL,
    READS_ALREADY,
    STANZA,
    TRAIN,
    UNTRAINED,
    Advice,
)
from rope_extend.advice.advised_recipe import BOOKS, LONGEST_BOOKS, first_fields, fit, work
from rope_extend.advice.question import (
    STANZA_LONGEST,
    STANZA_ORIGINAL,
    CurrentWindow,
    Question,
    data_flags,
    window_of_config,
)
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.checkpoint.info import info
from rope_extend.data.blocks import control_flags
from rope_extend.data.sources import source_files
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import AS_IS
from rope_extend.files import expand_home
from rope_extend.memory.gpus import Gpu, find_gpu
from rope_extend.method_names import CURRENT
from rope_extend.models.current_table import current_table
from rope_extend.models.families import family_for
from rope_extend.models.load_options import is_quantized
from rope_extend.models.loading import empty_model, pretrained
from rope_extend.training.step_plan import TrainingPlan
from rope_extend.units import format_bytes, format_length, parse_length

DEFAULT_GPU = "h100"
FSDP_LAUNCH = (
    "accelerate launch --num_processes {ranks} --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy "
    "TRANSFORMER_BASED_WRAP --fsdp_reshard_after_forward true --fsdp_cpu_ram_efficient_loading false "
    "-m rope_extend"
)
"""As configs/accelerate/fsdp2.yaml, which is not in the package."""
UNTRAINED_FACTOR = 2.0
"""Up to this factor an untrained method is worth a test first.

Beyond it, no untrained method has been shown to beat the same model cropped to its old window. On
SmolLM2-135M-Instruct, the largest model that was measured, at 4 times the window on source code
(docs/results/code_32k), `jet_long` is level with cropping (perplexity divided by the control's: 1.003, from
0.984 to 1.023), `dynamic_yarn` is 5 % worse (1.036 to 1.074), and `yarn` 13 % (1.110 to 1.158). At 2 times,
`jet_long` has 0.969 (0.936 to 1.004), and `dynamic_yarn` 0.992 (0.970 to 1.015).
"""


def advise(
    model: str | PathLike[str],
    target_length: int | str,
    *,
    gpu: str | None = None,
    engine: str | None = None,
    data: str | Sequence[str] | None = None,
    trained_length: int | None = None,
    train: bool = False,
) -> Advice:
    """Say how to let a model read a window, from its config alone. No weights are read.

    Args:
        model: a local directory or a hub id.
        target_length: the window, in tokens or as `"32k"`.
        gpu: a GPU's name, such as `h100`, or its memory, such as `24GB`; by default an H100. Several are
            written `8xh100`.
        engine: what will serve the result: `transformers`, `vllm`, `sglang` or `llama.cpp`.
        data: long documents for the recipe, from one source or several; by default PG-19, which are books.
        trained_length: the pretrained window in tokens, if the config is wrong or does not state it.
        train: advise training, because methods without training were measured and are not good enough.

    Returns:
        The advice. `verdict` says whether anything is to be done at all.

    Raises:
        RopeExtendError: no such model, a window of one token, or an unknown GPU or engine.
        UnsupportedModelError: the model's family is not supported.
    """
    name, target, device = expand_home(model), parse_length(target_length), find_gpu(gpu or DEFAULT_GPU)
    if target < 2:
        raise RopeExtendError(f"target_length must be at least 2 tokens, got {target}; give one such as 32k")
    if engine is not None and engine not in TARGETS:
        raise RopeExtendError(f"engine must be one of {', '.join(TARGETS)}, got {engine!r}")
    config = pretrained(AutoConfig, name)
    family_for(config.model_type)
    window = window_of_config(config)
    if trained_length is not None and trained_length > window.tokens:
        said = f"you say so, and its config says {format_length(window.tokens)}"
        window = replace(window, tokens=trained_length, source=said)
    texts = (data,) if isinstance(data, str) else tuple(data or ())
    if done := _nothing_to_do(name, config.model_type, window, target, trained_length, texts):
        return done
    found = info(name, trained_length=trained_length)
    # `info` takes scaling that was added by hand for untrained.
    trained = window.scaled and found.start == CURRENT and target > window.tokens > found.shape.trained_length
    question = Question(
        name, config.model_type, window, target, engine, found.shape, trained_length, is_quantized(config),
        current_table(empty_model(name), trained_length) if trained else None, texts,
    )  # fmt: skip
    if window.stanza and target <= STANZA_LONGEST and trained_length is None and not train:
        return _by_the_makers(question)
    return _train(question, device, untrained_first=not train)


def _nothing_to_do(
    name: str,
    model_type: str,
    window: CurrentWindow,
    target: int,
    trained_length: int | None,
    data: tuple[str, ...],
) -> Advice | None:
    """The advice for a model that needs no extension, or cannot use one; None for others."""
    local = f"No layer attends to more than {window.local:,} tokens" if window.local else ""
    if target <= min(window.tokens, trained_length or window.tokens):
        reason = (
            f"The model reads {format_length(window.tokens)} tokens as it is, and you want "
            f"{format_length(target)}. {window.source[0].upper()}{window.source[1:]}. Nothing is to be done; "
            "measure it if in doubt."
        )
        if local:
            reason += f" {local} at a time, so far tokens act through several layers only."
        stated = f" --trained-length {format_length(trained_length)}" if trained_length else ""
        what = f"--lengths {format_length(target)}{stated} {data_flags(data)}"
        measure = f"rope-extend evaluate {quote(name)} {what} --output as-it-is"
        return Advice(name, model_type, window, target, READS_ALREADY, reason, commands=(measure,))
    if local:
        reason = (
            f"{local}, in texts of any length. Another position encoding cannot change that. Choose a model "
            "whose layers attend to all tokens."
        )
        return Advice(name, model_type, window, target, LOCAL, reason)
    return None


def _by_the_makers(question: Question) -> Advice:
    """The advice for a model whose card gives a YaRN stanza."""
    reason = (
        "The makers of this model recommend YaRN without training up to "
        f"{format_length(STANZA_LONGEST)} tokens: factor {question.factor:g} over "
        f"{format_length(STANZA_ORIGINAL)}. If that is not good enough, ask again with train=True, which "
        "gives a recipe."
    )
    note = (
        "A fixed factor makes short texts somewhat worse. Use the smallest factor that you need, and the "
        "original config for short texts."
    )
    return Advice(
        question.model, question.model_type, question.window, question.target, STANZA, reason,
        trained_length=STANZA_ORIGINAL, factor=question.factor, method="yarn", untrained_method="yarn",
        commands=question.measuring(["none", "yarn"]), criteria=CRITERIA, notes=(note,),
        serving=question.serving("yarn", None), engines=question.engines("yarn"),
    )  # fmt: skip


def _train(question: Question, gpu: Gpu, *, untrained_first: bool) -> Advice:
    """The advice for a model that must be extended: its recipe, memory and hours."""
    fields, memory, no_short_blocks = fit(first_fields(question), question.extended, gpu)
    amount = work(fields, memory, gpu) if memory.fits else None
    if memory.fits and not memory.evaluates:
        fields = {key: value for key, value in fields.items() if not key.startswith("eval_")}
    untrained = None
    if untrained_first and question.factor <= UNTRAINED_FACTOR and question.current is None:
        inside = "dynamic_yarn" if family_for(question.model_type).unreachable else "jet_long"
        untrained = inside if question.engine in (None, "transformers") else "yarn"
    verdict, reason = UNTRAINED if untrained else TRAIN, _why(question, untrained)
    commands = question.measuring(["none", untrained]) if untrained else ()
    run: str | None = fields["output_dir"]
    if memory.fits:
        plain = "none" if question.current is None else AS_IS
        *planned, train = _training(memory)
        control = f"{train} {control_flags(fields, question.extended)} --output {quote(f'{run}-control')}"
        commands += (*planned, train, control, *question.measuring([plain], run))
    else:
        fields, run = {}, None
        misfit = _misfit(question, memory, gpu, no_short_blocks)
        verdict, reason = (verdict, f"{reason} {misfit}") if untrained else (DOES_NOT_FIT, misfit)
    method = "yarn" if run else untrained
    served = question.serving(method, run) if method else ()
    return Advice(
        question.model, question.model_type, question.window, question.target, verdict, reason,
        trained_length=question.extended, factor=question.factor, method="yarn", untrained_method=untrained,
        recipe=fields, memory=memory, work=amount, commands=commands, criteria=CRITERIA if commands else (),
        notes=tuple(_notes(question, fields, memory)), serving=served, start=question.start,
        engines=question.engines("yarn"),
    )  # fmt: skip


def _training(memory: TrainingPlan) -> tuple[str, str]:
    """The commands that plan the training, and start it."""
    ranks, fsdp = memory.sharding.ranks, memory.sharding.weights
    if ranks == 1:
        return f"rope-extend {FINETUNE} --plan", f"rope-extend {FINETUNE}"
    launch = FSDP_LAUNCH if fsdp else "torchrun --nproc-per-node {ranks} -m rope_extend"
    planned = f"rope-extend {FINETUNE} --plan --processes {ranks}{' --fsdp' if fsdp else ''}"
    return planned, f"{launch.format(ranks=ranks)} {FINETUNE}"


def _why(question: Question, untrained: str | None) -> str:
    """Why to train, or to try a method without training first."""
    old = format_length(question.extended)
    if question.current is not None:
        return (
            "The model was trained under its scaling, so the extension starts there (start: current). The "
            f"target is {question.factor:g} times the {old} that it reads today."
        )
    target = f"The target is {question.factor:g} times the pretrained window of {old}."
    if untrained:
        return (
            f"{target} At up to {UNTRAINED_FACTOR:g} times, {untrained} without training may be enough. "
            "Measure it; if it fails the criteria, train."
        )
    if question.factor <= UNTRAINED_FACTOR:
        return target
    return (
        f"{target} Beyond {UNTRAINED_FACTOR:g} times, no untrained method has been shown to beat the "
        "same model cropped to its old window: on SmolLM2-135M at 4 times, jet_long is level with it, "
        "dynamic_yarn 5 % worse, and yarn 13 %."
    )


def _misfit(question: Question, memory: TrainingPlan, gpu: Gpu, no_short_blocks: str | None) -> str:
    """That no recipe fits the GPU, why, and what to do."""
    short = (
        f"Shorter ones are no way out: {no_short_blocks}."
        if no_short_blocks
        else f"Blocks of {format_length(question.extended)} with positions from the whole target window do "
        "not fit either."
    )
    return (
        f"A step of training does not fit {gpu}, so there is no recipe: with all memory options, it "
        f"needs {format_bytes(memory.chosen.total)} of {format_bytes(memory.budget.available)}. The longest "
        f"block that fits has {memory.longest_block or 0:,} tokens. {short} Use a larger GPU."
    )


def _notes(question: Question, fields: Mapping[str, Any], memory: TrainingPlan) -> Iterator[str]:
    """What to know of a training, in addition to its recipe; `fields` is empty if none fits."""
    pretrained_window = format_length(question.shape.trained_length)
    if question.quantized:
        yield (
            "This checkpoint is quantised. Its weights are counted by the size of its files, so the memory "
            "is too low if they are not here yet."
        )
    if question.current is not None:
        yield (
            "`none` and the untrained methods of `evaluate` replace the scaling, and count from "
            f"{pretrained_window} tokens, so they are not this model. The control is {AS_IS}, the model as "
            "it is. We have measured start: current on our bundled model only."
        )
    elif question.window.scaled and question.window.tokens > question.shape.trained_length:
        yield (
            f"The config has scaling already. rope_extend replaces it: the factor counts from "
            f"{pretrained_window} tokens. `none` is plain RoPE; add {AS_IS} to the methods to measure the "
            "model as it is. If it was trained under its scaling, and that is one table, set start: current "
            "in the recipe."
        )
    if not fields:
        return
    if memory.chosen.quantized:
        yield "Weights of 4 bits are slower, and the hours do not count that."
    if not memory.evaluates:
        yield "The run's evaluations do not fit next to the training. Evaluate after it."
    if fields["data"] == BOOKS:
        yield (
            "The recipe trains on PG-19, books that it downloads from the hub, and evaluates on others of "
            "them. Without a network, or for other texts, ask again with long documents of your own, data=."
        )
    else:
        try:
            source_files(fields["data"])
        except RopeExtendError as error:
            yield f"The recipe needs its texts before it runs: {error}."
    if fields["data"] == BOOKS and question.target > LONGEST_BOOKS:
        yield (
            "PG-19 has books of about 100k tokens: few fill a longer block, and the run evaluates at up to "
            f"{format_length(LONGEST_BOOKS)}. Give longer documents."
        )
    if fields.get("positions"):
        yield (
            f"Blocks have {format_length(fields['block_length'])} tokens, with positions from the whole "
            "target window (PoSE). Long blocks show real distances; they need more memory or more hours."
        )
