"""Compare methods and adapters on the same text: what `rope-extend evaluate` does."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from rope_extend.checkpoint import Record, load_adapter, read_record
from rope_extend.data import format_length, load_documents
from rope_extend.encodings import RopeEncoding, RopeShape, encoding, rotary_method
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.perplexity import EvaluationRow, file_name, perplexity
from rope_extend.evaluation.plan import Plan, plan
from rope_extend.evaluation.protocols import protocol as protocol_of
from rope_extend.hardware import Hardware
from rope_extend.info import info
from rope_extend.patching import current_patch, extend, patch_model
from rope_extend.pretrained import pretrained
from rope_extend.processes import is_main_process, processes

logger = logging.getLogger(__name__)

AS_IS = "as-is"
"""The method that leaves a checkpoint with the encoding its config gives it."""


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
        lengths: in tokens; the trained window and its doublings up to 8x, if not given.
        methods: rotary methods by name; `none` is plain RoPE, `as-is` what the config says.
        adapters: directories of adapters for this model, each with its `rope_extend.json`.
        protocol: how perplexity is measured, as in `perplexity`; with its own `window`, `stride` or `last`.
        window: in tokens, for the protocol `cropped`.
        stride: in tokens, for the protocols with strided windows.
        last: in tokens, for the protocol `last-k`.
        cropped: also measure the rows that read with plain RoPE with their context cropped to the trained
            window: what the model is worth at that length without any extension. Where no row does, the
            model is measured so by itself. Under the protocol `prefix` alone.
        trained_length: the window the model was pretrained on, in tokens, where the config does not say it.
        max_documents: how many documents to use.
        max_tokens: cut documents to so many tokens, for protocols that read them whole.
        text_column: the column of a table that holds the text.
        split: the split of a hub dataset.
        hardware: how the model is loaded; by default as this machine suggests.
        chunk: read long windows in pieces of so many tokens, with a cache.
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
    rule.checked(wanted, {"window": window, "stride": stride, "last": last})
    if not methods and not adapters:
        raise RopeExtendError(f"nothing to evaluate: name a method, such as {AS_IS}, or give an adapter")
    for method in methods:
        _check_method(method, shape, wanted[-1])
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
    lm = hardware.load(model, reserve=foreseen.beside_weights if foreseen else 0)

    def measured(reader: nn.Module, label: str, adapter: str | None, **how: Any) -> EvaluationRow:
        patch = current_patch(reader)
        return EvaluationRow(
            label=label,
            encoding=patch.encoding.to_dict() if patch else None,
            model=str(model),
            adapter=adapter,
            result=perplexity(
                reader,
                documents,
                wanted,
                chunk=chunk,
                suggested_chunk=foreseen.longest.at_once if foreseen else None,
                save_losses=save_losses,
                finished=None if finished is None else Path(finished) / file_name(label),
                share=together is not None,
                progress=progress and is_main_process(),
                **how,
            ),
            trained_length=trained,
        )

    controls = cropped and protocol == "prefix" and wanted[-1] > trained

    def control(reader: nn.Module, label: str, adapter: str | None) -> EvaluationRow:
        label = f"{label}, cropped to {format_length(trained)}"
        return measured(reader, label, adapter, protocol="cropped", window=trained)

    def rows(reader: nn.Module, label: str, adapter: str | None) -> Iterator[EvaluationRow]:
        yield measured(reader, label, adapter, protocol=protocol, window=window, stride=stride, last=last)
        # An adapter trained with plain RoPE beyond its window is direct fine-tuning: it reads what it can.
        patch = current_patch(reader)
        if patch is None:
            plain = found.encoding == "none"
        else:
            plain = patch.encoding.name == "none" and patch.target_length <= trained
        if controls and plain:
            yield control(reader, label, adapter)

    for method in methods:
        logger.info("evaluating %s, untrained", method)
        if method == AS_IS:
            yield from rows(lm, AS_IS, None)
        elif method == "none":
            with patch_model(lm, encoding("none"), trained_length=trained):
                yield from rows(lm, method, None)
        else:
            with extend(lm, wanted[-1], method, trained_length=trained):
                yield from rows(lm, method, None)
    if controls and "none" not in methods and not (AS_IS in methods and found.encoding == "none"):
        with patch_model(lm, encoding("none"), trained_length=trained):
            yield control(lm, "none", None)
    for adapter, label in _labels(records).items():
        logger.info("evaluating %s", label)
        tuned = load_adapter(lm, adapter)
        try:
            yield from rows(tuned.eval(), label, str(adapter))
        finally:
            patch = current_patch(tuned)
            lm = tuned.unload()
            if patch is not None:
                patch.remove()


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
    encodings: list[RopeEncoding | None] = [None]
    for method in methods:
        _check_method(method, shape, wanted[-1])
        if method not in (AS_IS, "none"):
            encodings.append(rotary_method(method).for_target(shape, wanted[-1]))
    recorded = [read_record(adapter).encoding for adapter in adapters]
    encodings += [one for one in recorded if isinstance(one, RopeEncoding)]
    return plan(
        model, wanted, hardware=hardware or Hardware(), encodings=encodings, trained_length=trained,
        chunk=chunk, batched=batched,
    )  # fmt: skip


def _check_method(method: str, shape: RopeShape, longest: int) -> None:
    """Refuse, before anything is loaded, a method that could not be patched in later."""
    if method in (AS_IS, "none"):
        return
    cls = rotary_method(method)
    if longest <= shape.trained_length:
        raise RopeExtendError(
            f"the longest length, {longest}, is within the trained window of {shape.trained_length} tokens, "
            f"where there is nothing to extend; add a longer one, or leave methods at {AS_IS} or none"
        )
    cls.for_target(shape, longest)


def _labels(records: Mapping[str, Record]) -> dict[str, str]:
    """`yarn + LoRA`; `none + LoRA at 256` for a control; with the directory's name where two are alike."""
    labels = {}
    for adapter, record in records.items():
        labels[adapter] = f"{record.encoding.name} + LoRA"
        if record.encoding.name == "none":
            labels[adapter] += f" at {format_length(record.target_length)}"
    count = Counter(labels.values())
    return {
        adapter: f"{label} ({Path(adapter).name})" if count[label] > 1 else label
        for adapter, label in labels.items()
    }
