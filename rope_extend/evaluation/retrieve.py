"""Compare methods and adapters by retrieval, on the same prompts: what `rope-extend retrieve` does."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from rope_extend import plots
from rope_extend.checkpoint import Record, load_adapter, read_record
from rope_extend.data import format_length, load_documents
from rope_extend.demo import MODEL_DIR
from rope_extend.encodings import encoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluate import AS_IS, _check_method, _labels
from rope_extend.evaluation.report import _version
from rope_extend.evaluation.retrieval import (
    BATCH_TOKENS,
    RetrievalResult,
    answer_prompts,
    append_lines,
    depths_of,
    make_prompts,
)
from rope_extend.evaluation.tasks import CHAT, Prompt, make_tasks
from rope_extend.hardware import Hardware
from rope_extend.info import info
from rope_extend.inspection import unwrap
from rope_extend.patching import current_patch, extend, patch_model
from rope_extend.pretrained import pretrained

logger = logging.getLogger(__name__)

PROMPTS, TRIALS, SETTINGS = "prompts.jsonl", "trials.jsonl", "settings.json"
RESULTS, TABLE = "results.jsonl", "table.md"


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
    ``table.md``, a heat map for each row and task, and accuracy against length for each task.

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
    shape, is_plain = found.shape, found.encoding == "none"
    trained = shape.trained_length
    wanted = sorted(set(lengths or (trained * 2**power for power in range(4))))
    for method in methods:
        _check_method(method, shape, wanted[-1])
    records = {adapter: read_record(adapter) for adapter in adapters}
    for adapter, record in records.items():
        if record.shape != shape:
            raise RopeExtendError(f"the adapter in {adapter} is for another model than {model!r}")
    if not methods and not adapters:
        raise RopeExtendError("nothing to measure: give methods or adapters")
    template = template or ("demo" if _is_bundled(model) else "published")
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
        results.append(replace(found, label=label, model=str(model), adapter=adapter, trained_length=trained))

    near = [prompt for prompt in prompts if prompt.length <= trained]
    far = [prompt for prompt in prompts if prompt.length > trained]
    plain = next((name for name in methods if name == "none" or (name == AS_IS and is_plain)), None)
    # Where nobody asked for plain RoPE, it is measured within its window, for what the others changed there.
    added = ["none"] if controls and plain is None else []
    try:
        for label, of, reader in _readers(lm, [*added, *methods], records, trained, wanted[-1]):
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


def _readers(
    lm: Any, methods: Sequence[str], records: Mapping[str, Record], trained: int, longest: int
) -> Iterator[tuple[str, str | None, nn.Module]]:
    """The model under each method, then with each adapter: what to call it, the adapter, the model."""
    for method in methods:
        if method == AS_IS:
            yield method, None, lm
        elif method == "none":
            with patch_model(lm, encoding("none"), trained_length=trained):
                yield method, None, lm
        else:
            with extend(lm, longest, method, trained_length=trained):
                yield method, None, lm
    for adapter, label in _labels(records).items():
        tuned = load_adapter(lm, adapter)
        try:
            yield label, str(adapter), tuned.eval()
        finally:
            patch = current_patch(tuned)
            lm = tuned.unload()
            if patch is not None:
                patch.remove()


def _identity(adapter: str) -> str:
    """An adapter's directory and the digest of what is in it: trials of another one are not its own."""
    digest = hashlib.sha256()
    for file in sorted(Path(adapter).glob("*")):
        if file.suffix in (".safetensors", ".bin", ".json"):
            digest.update(file.name.encode() + file.read_bytes())
    return f"{adapter} {digest.hexdigest()[:16]}"


def _is_bundled(model: str) -> bool:
    return Path(model).is_dir() and Path(model).resolve() == MODEL_DIR


# ------------------------------------------------------------------------------------------------ files


def _check_output(output: str | Path, *, resume: bool, overwrite: bool) -> Path:
    """Refuse, before anything is computed, to mix two runs in one directory."""
    directory = Path(output)
    if directory.exists() and not directory.is_dir():
        raise RopeExtendError(f"{str(directory)!r} is a file; a report needs a directory")
    found = [name for name in (SETTINGS, TRIALS, RESULTS, TABLE) if (directory / name).exists()]
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
        for pattern in (TRIALS, RESULTS, TABLE, "heat_map_*.png", "accuracy_*.png"):
            for old_file in directory.glob(pattern):
                old_file.unlink()
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / PROMPTS).unlink(missing_ok=True)
    append_lines(directory / PROMPTS, [prompt.to_dict() for prompt in prompts])


def read_retrieval(path: str | Path) -> list[RetrievalResult]:
    """Read the rows of a ``results.jsonl`` of retrieval, or of the directory that holds one.

    Raises:
        RopeExtendError: there is no such file, or it holds something else.
    """
    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise RopeExtendError(f"no results at {str(file)!r}; retrieve writes {RESULTS} into its directory")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [RetrievalResult.from_dict(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise RopeExtendError(f"{str(file)!r} does not hold results of retrieval: {error!r}") from error


def read_retrievals(paths: Sequence[str | Path]) -> list[RetrievalResult]:
    """Rows of several runs, with the run's name where two have one label; see :func:`read_retrieval`."""
    found = [(Path(path), one) for path in paths for one in read_retrieval(path)]
    labels = Counter(one.label for _, one in found)
    return [
        replace(one, label=f"{one.label} ({(path.parent if path.is_file() else path).name})")
        if labels[one.label] > 1
        else one
        for path, one in found
    ]


def write_retrieval(results: Sequence[RetrievalResult], directory: str | Path) -> list[Path]:
    """Write ``results.jsonl``, ``table.md`` and the pictures; return their paths.

    Raises:
        RopeExtendError: there are no results.
    """
    if not results:
        raise RopeExtendError("no results to report")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / RESULTS, directory / TABLE]
    versions = {name: _version(name) for name in ("rope_extend", "torch", "transformers")}
    rows = [json.dumps({**result.to_dict(), "versions": versions}) + "\n" for result in results]
    paths[0].write_text("".join(rows), encoding="utf-8")
    paths[1].write_text(retrieval_table(results), encoding="utf-8")
    for task in _tasks(results):
        paths.append(plots.plot_accuracy(results, task, directory / f"accuracy_{task}.png"))
        for result in results:
            if result.depths(task):
                name = "".join(c if c.isalnum() else "_" for c in f"heat_map_{task}_{result.label}")
                paths.append(plots.plot_heat_map(result, task, directory / f"{name}.png"))
    return paths


def retrieval_table(results: Sequence[RetrievalResult]) -> str:
    """Markdown: for each task, accuracy by row and length; then what became of the trained window."""
    parts = []
    for task in _tasks(results):
        some = [result for result in results if task in result.tasks]
        lengths = sorted({length for result in some for length in result.lengths(task)})
        longest = lengths[-1]
        lines = [[task, *map(format_length, lengths)]]
        with_k = any(result.k_max(longest, task) is not None for result in some) and task == "passkey"
        if with_k:
            lines[0].append(f"k_max at {format_length(longest)}")
        for result in some:
            rates = [result.rate(task, length) for length in lengths]
            k_max = result.k_max(longest, task)
            lines.append(
                [result.label, *(str(rate) if rate else "–" for rate in rates)]
                + ([f"{k_max:,}" if k_max is not None else "–"] if with_k else [])
            )
        parts.append(_table(lines))
    trained = results[0].trained_length
    control = _window_control(results, trained) if trained else None
    if control:
        parts.append(f"Within the trained window, {trained} tokens, before and after:\n\n{control}")
    cells = [cell for result in results for cell in result.cells]
    counts = sorted({len(cell.scores) for cell in cells if cell.depth is not None})
    notes = ["Share of trials solved, mean over depths, with the 95 % Wilson interval in per cent."]
    if counts:
        notes.append(f"Trials at each depth and length: {', '.join(map(str, counts))}.")
    if any("passkey" in result.tasks for result in results):
        notes.append(
            "k_max: the largest distance in tokens from key to end up to which 20 % of the trials succeed."
        )
    notes += [
        f"{result.label}: the model saw a prompt's last {result.crop} tokens only."
        for result in results
        if result.crop
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


def _window_control(results: Sequence[RetrievalResult], trained: int) -> str | None:
    """How each row reads at the trained window, against the model that was not changed."""
    base = next((one for one in results if one.label in ("none", AS_IS) and one.crop is None), None)
    others = [one for one in results if one is not base and one.crop is None]
    if base is None or not others:
        return None
    lines = [["", "task", "before", "after", "difference"]]
    for one in others:
        for task in one.tasks:
            before, after = base.rate(task, trained), one.rate(task, trained)
            if before and after:
                change = f"{100 * (after.mean - before.mean):+.0f} points"
                lines.append([one.label, task, str(before), str(after), change])
    return _table(lines) if len(lines) > 1 else None


def _tasks(results: Sequence[RetrievalResult]) -> list[str]:
    return list(dict.fromkeys(task for result in results for task in result.tasks))


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in (lines[0], rule, *lines[1:])
    )
