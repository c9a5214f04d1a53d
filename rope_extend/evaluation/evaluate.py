"""Compare methods and adapters on the same text: what `rope-extend evaluate` does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from rope_extend.checkpoint import read_record
from rope_extend.data import format_length, load_documents
from rope_extend.encodings import Encoding, method_named
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.plan import Plan, plan
from rope_extend.evaluation.prompts import Prompt
from rope_extend.evaluation.protocols import protocol as protocol_of
from rope_extend.evaluation.results import EvaluationRow, file_name
from rope_extend.evaluation.retrieval import answer_prompts, make_prompts, prompts_fingerprint
from rope_extend.evaluation.tasks import Passkey, template_for
from rope_extend.evaluation.variants import AS_IS, PLAIN, check_method, variants
from rope_extend.hardware import Hardware
from rope_extend.info import info
from rope_extend.patching import current_patch
from rope_extend.pretrained import pretrained
from rope_extend.processes import is_main_process, processes

logger = logging.getLogger(__name__)

RETRIEVAL = 4
"""Passkeys at each of `DEPTHS` depths within the trained window, if not said otherwise."""

DEPTHS = 5
"""Of these passkeys, evenly spread from the beginning of a prompt to its end."""


def evaluate(
    model: str,
    *,
    data: str | Path | Sequence[str | Path],
    lengths: Sequence[int] | None = None,
    methods: Sequence[str] = (AS_IS,),
    adapters: Sequence[str] = (),
    protocol: str = "prefix",
    window: int | None = None,
    stride: int | None = None,
    last: int | None = None,
    cropped: bool = True,
    retrieval: int = RETRIEVAL,
    trained_length: int | None = None,
    max_documents: int | None = 16,
    max_tokens: int | None = None,
    text_column: str = "text",
    split: str = "train",
    hardware: Hardware | None = None,
    chunk: int | None = None,
    save_losses: bool = False,
    finished: str | Path | None = None,
    progress: bool = True,
) -> Iterator[EvaluationRow]:
    """Measure perplexity with each method, untrained, and with each adapter; yields a row as it is done.

    Every row is measured on the same tokens. Methods extend the model to the longest of `lengths`. Everything
    is checked before the weights are loaded. Under `torchrun` or `accelerate launch` each process reads its
    share of the documents, and all get the same rows.

    Args:
        model: a checkpoint's directory or hub id.
        data: long documents, as `load_documents` takes them.
        lengths: in tokens; the trained window and its doublings up to 8x, if not given. Where one pass gives
            all of them, the trained window is measured as well.
        methods: methods by name; `none` is plain RoPE, `as-is` what the config says.
        adapters: directories of adapters for this model, each with its `rope_extend.json`.
        protocol: how perplexity is measured, as in `perplexity`; with its own `window`, `stride` or `last`.
        window: in tokens, for the protocol `cropped`.
        stride: in tokens, for the protocols with strided windows.
        last: in tokens, for the protocol `last-k`.
        cropped: also measure the rows that read with plain RoPE with their context cropped to the trained
            window: what the model is worth at that length without any extension. Where no row does, the
            model is measured so by itself. Under protocols that score the same targets at every length.
        retrieval: the other control of what becomes of short texts: so many passkeys at each of five depths,
            in prompts of the trained window, where there is plain RoPE and something to hold against it.
            Answering them costs each row so many times five windows. 0: none.
        trained_length: the window the model was pretrained on, in tokens, where the config does not say it.
        max_documents: how many documents to use.
        max_tokens: cut documents to so many tokens, for protocols that read them whole.
        text_column: the column of a table that holds the text.
        split: the split of a hub dataset.
        hardware: how the model is loaded; by default as this machine suggests.
        chunk: read long windows in pieces of so many tokens, layer by layer.
        save_losses: keep the loss of every token in each row's `result.losses`.
        finished: directory in which the losses of finished documents are kept, row by row; a second call
            goes on from there.
        progress: show progress bars, if there is a terminal.

    Raises:
        RopeExtendError: no such model, adapter, method or data, or texts that are too short.
    """
    found = info(model, trained_length=trained_length)
    shape = found.shape
    trained = shape.trained_length
    wanted = sorted(set(lengths or (trained * 2**power for power in range(4))))
    rule = protocol_of(protocol)
    if rule.nested and wanted[-1] > trained:
        # For what became of short texts; where one pass gives all lengths, this one comes with it.
        wanted = sorted({*wanted, trained})
    settings = rule.checked(wanted, {"window": window, "stride": stride, "last": last})
    if retrieval < 0:
        raise RopeExtendError(f"retrieval is a number of passkeys at each depth, 0 or more; got {retrieval}")
    methods = list(dict.fromkeys(methods))
    if not methods and not adapters:
        raise RopeExtendError(f"nothing to evaluate: name a method, such as {AS_IS}, or give an adapter")
    for method in methods:
        check_method(method, shape, wanted[-1])
    records = {adapter: read_record(adapter) for adapter in adapters}
    for adapter, record in records.items():
        if record.shape != shape:
            raise RopeExtendError(f"the adapter in {adapter} is for another model than {model!r}")
    hardware = hardware or Hardware()
    foreseen = plan_of(
        model, methods, adapters, lengths=wanted, hardware=hardware, trained_length=trained_length,
        chunk=chunk, batched=cropped or not rule.nested,
    )  # fmt: skip
    if foreseen is not None:
        logger.info("%s", foreseen)
        foreseen.check()
    tokenizer = pretrained(AutoTokenizer, model)
    together = processes(hardware.place)
    with together.main_process_first() if together else nullcontext():  # the others find what it tokenised
        documents = load_documents(
            data,
            tokenizer,
            text_column=text_column,
            split=split,
            min_tokens=0 if rule.joined else wanted[-1] + rule.beyond,
            max_documents=max_documents,
            max_tokens=wanted[-1] if rule.nested else max_tokens,
        )
    plain = [name for name in methods if name == PLAIN or (name == AS_IS and found.encoding == "none")]
    # A cropped context is a control where it is the same targets that are scored with it.
    crops = protocol == "prefix" or (rule.same_targets and max(settings.values(), default=0) <= trained)
    controls = cropped and crops and wanted[-1] > trained
    compared = len(methods) + len(adapters) > len(plain) and (controls or bool(plain))
    task = Passkey(template=template_for(model))
    prompts = _passkeys(task, tokenizer, trained, retrieval) if retrieval and compared else []
    lm = hardware.load(model, reserve=foreseen.beside_weights if foreseen else 0)

    def measured(
        reader: nn.Module, label: str, adapter: str | None, lengths: Sequence[int] = wanted, **how: Any
    ) -> EvaluationRow:
        patch = current_patch(reader)
        return EvaluationRow(
            label=label,
            encoding=patch.encoding.to_dict() if patch else None,
            model=str(model),
            adapter=adapter,
            result=perplexity(
                reader,
                documents,
                lengths,
                chunk=chunk,
                suggested_chunk=foreseen.longest.at_once if foreseen else None,
                save_losses=save_losses,
                finished=None if finished is None else Path(finished) / file_name(label),
                share=together is not None,
                progress=progress and is_main_process(),
                **how,
            ),
            trained_length=trained,
            rope_parameters=None if patch else found.rope_parameters,
        )

    def control(reader: nn.Module, label: str, adapter: str | None) -> EvaluationRow:
        label = f"{label}, cropped to {format_length(trained)}"
        if rule.nested:
            return measured(reader, label, adapter, protocol="cropped", window=trained)
        row = measured(reader, label, adapter, [trained], protocol=protocol, stride=stride, last=last)
        return replace(row, result=row.result.repeated(trained, wanted))

    def retrieved(reader: nn.Module, row: EvaluationRow) -> EvaluationRow:
        if not prompts or not is_main_process():  # few and short: not worth sharing
            return row
        # Beside the row's finished documents, which are of the same model, or it would have been refused.
        log = None if finished is None else Path(finished) / file_name(row.label) / "trials.jsonl"
        try:
            answers = answer_prompts(
                reader, tokenizer, [task], prompts, label=f"{row.label} {prompts_fingerprint(prompts)}",
                log=log, progress=progress,
            )  # fmt: skip
        except RopeExtendError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            # A control is not worth the measurement that it belongs to.
            logger.warning("%s: retrieval within the trained window is not measured: %s", row.label, error)
            return row
        about = {name: getattr(row, name) for name in ("label", "model", "adapter", "rope_parameters")}
        return replace(row, retrieval=replace(answers, trained_length=trained, **about))

    alone = [PLAIN] if controls and not plain else []
    for label, of, reader in variants(lm, [*methods, *alone], records, trained, wanted[-1]):
        logger.info("evaluating %s%s", label, "" if of else ", untrained")
        if label in alone:
            yield retrieved(reader, control(reader, label, of))
            continue
        row = measured(reader, label, of, protocol=protocol, window=window, stride=stride, last=last)
        yield retrieved(reader, row)
        # An adapter trained with plain RoPE beyond its window is direct fine-tuning: it reads what it can.
        patch = current_patch(reader)
        if patch is None:
            unchanged = found.encoding == "none"
        else:
            unchanged = patch.encoding.name == "none" and patch.target_length <= trained
        if controls and unchanged:
            yield control(reader, label, of)


def plan_of(
    model: str,
    methods: Sequence[str] = (AS_IS,),
    adapters: Sequence[str] = (),
    *,
    lengths: Sequence[int] | None = None,
    hardware: Hardware | None = None,
    trained_length: int | None = None,
    chunk: int | None = None,
    batched: bool = False,
) -> Plan | None:
    """What :func:`evaluate` will take, in memory and time, from the config alone; arguments as there.

    Args:
        model: a checkpoint's directory or hub id.
        methods: as in :func:`evaluate`.
        adapters: as in :func:`evaluate`.
        lengths: as in :func:`evaluate`.
        hardware: as in :func:`evaluate`.
        trained_length: as in :func:`evaluate`.
        chunk: as in :func:`evaluate`.
        batched: whether the protocol reads many short windows.

    Returns:
        The plan, or None for a family of which none can be made.
    """
    shape = info(model, trained_length=trained_length).shape
    trained = shape.trained_length
    wanted = sorted(set(lengths or (trained * 2**power for power in range(4))))
    encodings: list[Encoding | None] = [None]
    for method in methods:
        check_method(method, shape, wanted[-1])
        if method not in (AS_IS, PLAIN):
            encodings.append(method_named(method).for_target(shape, wanted[-1]))
    tuned = [(Path(adapter), read_record(adapter).encoding) for adapter in adapters]
    return plan(
        model, wanted, hardware=hardware or Hardware(), encodings=encodings, adapters=tuned,
        trained_length=trained, chunk=chunk, batched=batched,
    )  # fmt: skip


def _passkeys(task: Passkey, tokenizer: Any, length: int, trials: int) -> list[Prompt]:
    """Prompts of the trained window; none, and a word about it, where the task does not fit."""
    try:
        return make_prompts([task], tokenizer, [length], depths=DEPTHS, trials=trials, progress=False)
    except RopeExtendError as error:
        logger.warning("retrieval within the trained window is not measured: %s", error)
        return []
