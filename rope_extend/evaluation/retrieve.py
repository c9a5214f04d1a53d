"""Compare methods and adapters by retrieval, on the same prompts: what `rope-extend retrieve` does."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from rope_extend.checkpoint import read_record
from rope_extend.data import format_length, load_documents
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.prompts import CHAT, Prompt
from rope_extend.evaluation.results import RetrievalResult
from rope_extend.evaluation.retrieval import (
    BATCH_TOKENS,
    answer_prompts,
    append_lines,
    depths_of,
    make_prompts,
)
from rope_extend.evaluation.retrieval_report import PAGE, PICTURES, RESULTS, TABLE, write_retrieval
from rope_extend.evaluation.tasks import make_tasks, template_for
from rope_extend.evaluation.variants import AS_IS, PLAIN, check_method, variants
from rope_extend.hardware import Hardware
from rope_extend.info import info
from rope_extend.inspection import unwrap
from rope_extend.pretrained import pretrained

logger = logging.getLogger(__name__)

PROMPTS, TRIALS, SETTINGS = "prompts.jsonl", "trials.jsonl", "settings.json"


def retrieve(
    model: str,
    *,
    output: str | Path,
    tasks: Sequence[str] = ("passkey",),
    lengths: Sequence[int] | None = None,
    depths: int | Sequence[float] = 5,
    trials: int = 10,
    methods: Sequence[str] = (AS_IS,),
    adapters: Sequence[str] = (),
    data: str | Path | Sequence[str | Path] | None = None,
    controls: bool = True,
    template: str | None = None,
    chat: str = "auto",
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    trained_length: int | None = None,
    max_documents: int = 16,
    hardware: Hardware | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> list[RetrievalResult]:
    """Compare methods and adapters on the same prompts, and write the report; what ``retrieve`` does.

    The directory gets ``prompts.jsonl``, ``trials.jsonl``, ``settings.json``, ``results.jsonl`` and
    ``table.md``, a heat map for each row and task, accuracy against length for each task, and all of it
    in ``report.html``.

    Args:
        model: a checkpoint's directory or hub id.
        output: directory of the report.
        tasks: names of tasks.
        lengths: in tokens; the trained window and its doublings up to 8x, if not given.
        depths: how many, evenly spread, or which.
        trials: prompts at each depth.
        methods: rotary methods by name; ``none`` is plain RoPE, ``as-is`` what the config says.
        adapters: directories of adapters for this model.
        data: long documents for the haystack; repeated filler, if not given.
        controls: also measure at the trained window, before and after, and plain RoPE with the context
            cropped to it.
        template: of the passkey task; ``published``, or ``demo`` if the model is the bundled one.
        chat: whether to use the tokenizer's chat template: ``auto``, ``on``, ``off``.
        seed: of the prompts.
        batch_tokens: how many tokens of prompts to answer at a time.
        trained_length: the window the model was pretrained on, where the config does not say it.
        max_documents: how many documents to use.
        hardware: how the model is loaded; by default as this machine suggests.
        resume: go on with what the directory holds.
        overwrite: replace what it holds.
        progress: show progress bars, if there is a terminal.

    Raises:
        RopeExtendError: a mistake in any of these, before the weights are loaded.
    """
    directory = _check_output(output, resume=resume, overwrite=overwrite)
    if chat not in CHAT:
        raise RopeExtendError(f"chat must be one of {', '.join(CHAT)}, got {chat!r}")
    hardware = hardware or Hardware()
    found = info(model, trained_length=trained_length)
    shape, is_plain, parameters = found.shape, found.encoding == "none", found.rope_parameters
    trained = shape.trained_length
    wanted = sorted(set(lengths or (trained * 2**power for power in range(4))))
    methods = list(dict.fromkeys(methods))
    for method in methods:
        check_method(method, shape, wanted[-1])
    records = {adapter: read_record(adapter) for adapter in adapters}
    for adapter, record in records.items():
        if record.shape != shape:
            raise RopeExtendError(f"the adapter in {adapter} is for another model than {model!r}")
    if not methods and not adapters:
        raise RopeExtendError("nothing to measure: give methods or adapters")
    template = template or template_for(model)
    make_tasks(tasks, template=template)
    tokenizer = pretrained(AutoTokenizer, model)
    texts: list[str] = []
    if data is not None:
        documents = load_documents(data, tokenizer, max_documents=max_documents, max_tokens=wanted[-1])
        texts = [tokenizer.decode(one.input_ids, skip_special_tokens=True) for one in documents]
    kinds = make_tasks(tasks, haystack=texts, template=template)
    options: dict[str, Any] = {"depths": depths, "trials": trials, "seed": seed, "chat": chat}
    prompts = make_prompts(kinds, tokenizer, wanted, **options, progress=progress)
    if controls and trained not in wanted:
        for kind in kinds:
            try:
                prompts += make_prompts([kind], tokenizer, [trained], **options, progress=progress)
            except RopeExtendError as error:
                logger.warning("no control of %s within the trained window: %s", kind.name, error)
    settings = {
        "model": str(model),
        "tasks": [kind.describe() for kind in kinds],
        "lengths": wanted,
        "depths": depths_of(depths),
        **{name: options[name] for name in ("trials", "seed", "chat")},
        "trained_length": trained,
        "batch_tokens": batch_tokens,
    }
    how = {"dtype": str(unwrap(hardware.empty(model)).dtype), "quantize": hardware.quantize}
    _start(directory, {**settings, **how}, prompts, resume=resume)
    lm = hardware.load(model)

    results: list[RetrievalResult] = []

    def measure(
        reader: nn.Module, label: str, adapter: str | None, some: Sequence[Prompt], crop: int | None = None
    ) -> None:
        logger.info("retrieval: %s", label)
        found = answer_prompts(
            reader, tokenizer, kinds, some, label=_identity(adapter) if adapter else label, crop=crop,
            batch_tokens=batch_tokens, log=directory / TRIALS, progress=progress,
        )  # fmt: skip
        results.append(
            replace(
                found,
                label=label,
                model=str(model),
                adapter=adapter,
                trained_length=trained,
                rope_parameters=parameters if found.encoding is None else None,
            )
        )

    near = [prompt for prompt in prompts if prompt.length <= trained]
    far = [prompt for prompt in prompts if prompt.length > trained]
    plain = next((name for name in methods if name == PLAIN or (name == AS_IS and is_plain)), None)
    # Where nobody asked for plain RoPE, it is measured within its window, for what the others changed there.
    added = [PLAIN] if controls and plain is None else []
    try:
        for label, of, reader in variants(lm, [*added, *methods], records, trained, wanted[-1]):
            some = near if of is None and label in added else prompts
            if some:
                measure(reader, label, of, some)
            if controls and of is None and far and label in (plain, *added):
                measure(reader, f"{label}, cropped to {format_length(trained)}", None, far, crop=trained)
    except KeyboardInterrupt:
        logger.warning("finished trials are in %s; --resume goes on from there", directory / TRIALS)
        raise
    write_retrieval(results, directory)
    return results


def _identity(adapter: str) -> str:
    """An adapter's directory and the digest of what is in it: trials of another one are not its own."""
    digest = hashlib.sha256()
    for file in sorted(Path(adapter).glob("*")):
        if file.suffix in (".safetensors", ".bin", ".json"):
            digest.update(file.name.encode() + file.read_bytes())
    return f"{adapter} {digest.hexdigest()[:16]}"


# ------------------------------------------------------------------------------------------------ files


def _check_output(output: str | Path, *, resume: bool, overwrite: bool) -> Path:
    """Refuse, before anything is computed, to mix two runs in one directory."""
    directory = Path(output)
    if directory.exists() and not directory.is_dir():
        raise RopeExtendError(f"{str(directory)!r} is a file; a report needs a directory")
    found = [name for name in (SETTINGS, TRIALS, RESULTS, TABLE, PAGE) if (directory / name).exists()]
    if resume and overwrite:
        raise RopeExtendError("resume goes on with what is there, overwrite replaces it: give one of them")
    if resume and found and SETTINGS not in found:
        raise RopeExtendError(f"{str(directory)!r} holds another kind of report, not a run to go on with")
    if found and not (resume or overwrite):
        raise RopeExtendError(
            f"{str(directory)!r} already holds {', '.join(found)}; give another directory, resume=True "
            "(--resume) to go on with that run, or overwrite=True (--overwrite) to replace it"
        )
    return directory


def _start(directory: Path, settings: dict[str, Any], prompts: Sequence[Prompt], *, resume: bool) -> None:
    """Write what a run asks; a resumed one must ask the same."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / SETTINGS
    settings = json.loads(json.dumps(settings))
    if resume and file.exists():
        old = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name in settings if old.get(name) != settings[name]]
        if changed:
            raise RopeExtendError(
                f"the run in {str(directory)!r} has other settings, so its trials cannot be used: "
                + "; ".join(f"{name} was {old.get(name)!r}, now {settings[name]!r}" for name in changed)
            )
    else:
        for pattern in (TRIALS, RESULTS, TABLE, PAGE, *PICTURES):
            for old_file in directory.glob(pattern):
                old_file.unlink()
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / PROMPTS).unlink(missing_ok=True)
    append_lines(directory / PROMPTS, [prompt.to_dict() for prompt in prompts])
