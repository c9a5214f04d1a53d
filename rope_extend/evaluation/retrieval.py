"""Retrieval over depth and length: can the model say what stands somewhere in a long text?

Every method reads the same prompts, each of an exact number of tokens. The prompts of one task and length are
therefore equally long and are answered in batches without padding, greedily, with a cache, and no further
than the score is settled. Each finished trial is a JSON line, so that an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rope_extend.data import parse_length
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.evaluation.perplexity import peak_memory_bytes
from rope_extend.evaluation.prompts import Prompt, Task, encode, make_prompt
from rope_extend.evaluation.results import Cell, RetrievalResult
from rope_extend.hardware import input_device
from rope_extend.patching import Patch, current_patch

logger = logging.getLogger(__name__)

BATCH_TOKENS = 32_768
"""How many tokens of prompts are answered at a time, if not said otherwise; at least one prompt is."""

Grid = tuple[str, int, float | None]
"""Task, length in tokens, depth."""


# ---------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Trial:
    """One answered prompt; fields as those of :class:`Prompt`, ``score`` between 0 and 1."""

    task: str
    length: int
    depth: float | None
    trial: int
    distance: int | None
    answers: tuple[str, ...]
    response: str
    score: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From a line of ``trials.jsonl``; what else stands in it is left aside."""
        known = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "answers": tuple(known["answers"])})


# ------------------------------------------------------------------------------------------- measurement


def make_prompts(
    tasks: Sequence[Task],
    tokenizer: Any,
    lengths: Sequence[int | str],
    *,
    depths: int | Sequence[float] = 5,
    trials: int = 10,
    seed: int = 0,
    chat: str = "auto",
    progress: bool = True,
) -> list[Prompt]:
    """Write all prompts of a run: for each task and length, ``trials`` at each depth.

    A task without a depth gets as many trials at a length as the others get at all depths together.

    Args:
        tasks: what to ask.
        tokenizer: the model's.
        lengths: tokens of prompt and answer.
        depths: how many, evenly spread from 0 to 1 (one is 0.5); or which.
        trials: prompts at each depth.
        seed: of everything random.
        chat: whether to use the tokenizer's chat template: ``auto`` if it has one, ``on``, ``off``.
        progress: show a progress bar, if there is a terminal.

    Raises:
        RopeExtendError: an argument makes no sense, or a task does not fit a length.
    """
    places = depths_of(depths)
    if trials < 1:
        raise RopeExtendError(f"trials must be at least 1, got {trials}")
    sizes = sorted({parse_length(length) for length in lengths})
    if not tasks or not sizes:
        raise RopeExtendError("retrieval needs at least one task and one length")
    grid: list[tuple[Task, int, float | None, int]] = []
    for task in tasks:
        for size in sizes:
            make_prompt(task, tokenizer, size, seed=seed, chat=chat)  # refuses at once what does not fit
            cells: list[tuple[float | None, int]] = [
                (depth, trial) for depth in places for trial in range(trials)
            ]
            if not task.placed:
                cells = [(None, trial) for trial in range(trials * len(places))]
            grid += [(task, size, depth, trial) for depth, trial in cells]
    bar = tqdm(grid, desc="prompts", unit="prompt", disable=None if progress else True)
    return [
        make_prompt(task, tokenizer, size, depth, trial, seed=seed, chat=chat)
        for task, size, depth, trial in bar
    ]


def depths_of(depths: int | Sequence[float]) -> list[float]:
    """Depths from a number of them, evenly spread, or as given.

    Raises:
        RopeExtendError: none, or outside 0 … 1.
    """
    if isinstance(depths, int):
        places = [0.5] if depths == 1 else [float(p) for p in np.linspace(0, 1, max(depths, 0)).round(6)]
    else:
        places = sorted({float(depth) for depth in depths})
    if not places or not all(0 <= place <= 1 for place in places):
        raise RopeExtendError(f"depths must be a number of them, or numbers between 0 and 1; got {depths!r}")
    return places


def retrieval(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[Task],
    lengths: Sequence[int | str],
    *,
    depths: int | Sequence[float] = 5,
    trials: int = 10,
    seed: int = 0,
    chat: str = "auto",
    label: str = "model",
    crop: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    log: str | Path | None = None,
    progress: bool = True,
) -> RetrievalResult:
    """Measure retrieval of a model as it stands: patched or not, with or without an adapter.

    Args:
        model: a causal language model; left in the mode it was found in.
        tokenizer: the model's.
        tasks: what to ask, see :func:`make_tasks`.
        lengths: tokens of prompt and answer together; ``"32k"`` works too.
        depths: how many depths, evenly spread, or which.
        trials: prompts at each depth.
        seed: of the prompts.
        chat: whether to use the tokenizer's chat template.
        label: what to call the result.
        crop: show the model only this many of a prompt's last tokens, the answer's included: the control
            that says what no longer context could.
        batch_tokens: how many tokens of prompts to answer at a time.
        log: a file of JSON lines, one for each finished trial; those that it has under this label already
            are not tried again.
        progress: show a progress bar with rate and time left, if there is a terminal.

    Raises:
        RopeExtendError: an argument makes no sense, a task does not fit a length, or one prompt alone does
            not fit the GPU.
    """
    prompts = make_prompts(
        tasks, tokenizer, lengths, depths=depths, trials=trials, seed=seed, chat=chat, progress=progress
    )
    return answer_prompts(
        model, tokenizer, tasks, prompts, label=label, crop=crop, batch_tokens=batch_tokens, log=log,
        progress=progress,
    )  # fmt: skip


def answer_prompts(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[Task],
    prompts: Sequence[Prompt],
    *,
    label: str = "model",
    crop: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    log: str | Path | None = None,
    progress: bool = True,
) -> RetrievalResult:
    """Answer prompts that are written already; arguments and errors are those of :func:`retrieval`."""
    if batch_tokens < 1:
        raise RopeExtendError(f"batch_tokens must be at least 1, got {batch_tokens}")
    kinds = {task.name: task for task in tasks}
    least = max((task.new_tokens for task in tasks), default=0)
    if crop is not None and crop <= least:
        raise RopeExtendError(f"crop must leave more than the answer's {least} tokens, got {crop}")
    place = torch.device(getattr(model, "device", "cpu"))
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    started, forward_tokens = time.perf_counter(), 0
    done = _read_trials(log, label) if log else {}
    batches = _batches(prompts, batch_tokens, crop)
    bar = tqdm(
        total=sum(_seen(prompt, crop) for prompt in prompts), desc=label, unit="tok", unit_scale=True,
        disable=None if progress else True,
    )  # fmt: skip
    with _evaluating(model), torch.no_grad(), bar:
        for batch in batches:
            # A batch is the same in every run, so that a resumed run computes what an uninterrupted one does.
            if not all(_key(prompt) in done for prompt in batch):
                found = _answer(model, tokenizer, kinds[batch[0].task], batch, crop)
                new = [trial for trial in found if _key(trial) not in done]
                done |= {_key(trial): trial for trial in new}
                forward_tokens += sum(_seen(prompt, crop) for prompt in batch)
                if log:
                    append_lines(log, [{"label": label, **asdict(trial)} for trial in new])
            bar.update(sum(_seen(prompt, crop) for prompt in batch))
    patch = _patch_of(model)
    cells: dict[Grid, list[Prompt]] = {}
    for prompt in prompts:
        cells.setdefault((prompt.task, prompt.length, prompt.depth), []).append(prompt)
    return RetrievalResult(
        label=label,
        cells=tuple(
            Cell(
                *where,
                _least(prompt.distance for prompt in some),
                tuple(done[_key(prompt)].score for prompt in some),
                prompts_fingerprint(some),
            )
            for where, some in cells.items()
        ),
        encoding=patch.encoding.to_dict() if patch else None,
        trained_length=patch.shape.trained_length if patch else None,
        crop=crop,
        seconds=time.perf_counter() - started,
        forward_tokens=forward_tokens,
        peak_memory_bytes=peak_memory_bytes(place),
    )


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Sixteen hex digits that name exactly these prompts and what is to be answered, in this order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.answers, prompt.tokens]).encode())
    return digest.hexdigest()[:16]


def _least(distances: Iterable[int | None]) -> int | None:
    return min((distance for distance in distances if distance is not None), default=None)


def _key(one: Prompt | Trial) -> tuple[str, int, float | None, int]:
    return one.task, one.length, one.depth, one.trial


def _seen(prompt: Prompt, crop: int | None) -> int:
    """How many tokens of a prompt the model reads: the room for the answer is part of what is cropped to."""
    return prompt.tokens if crop is None else min(prompt.tokens, crop - (prompt.length - prompt.tokens))


def _cropped(ids: list[int], tokens: int, bos: int | None) -> list[int]:
    """The last ``tokens``; a token that begins every text stays in front, as models read badly without."""
    if len(ids) > tokens and ids[0] == bos:
        return [ids[0], *ids[len(ids) - tokens + 1 :]]
    return ids[-tokens:]


def _batches(prompts: Sequence[Prompt], batch_tokens: int, crop: int | None) -> list[list[Prompt]]:
    """Prompts of one task and length together, as many as hold ``batch_tokens``, at least one."""
    groups: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.task, prompt.length), []).append(prompt)
    made = []
    for group in groups.values():
        rows = max(1, batch_tokens // _seen(group[0], crop))
        made += [group[start : start + rows] for start in range(0, len(group), rows)]
    return made


def _answer(
    model: nn.Module, tokenizer: Any, task: Task, batch: Sequence[Prompt], crop: int | None
) -> list[Trial]:
    rows = [
        _cropped(encode(tokenizer, prompt.text, prompt.chat), _seen(prompt, crop), tokenizer.bos_token_id)
        for prompt in batch
    ]
    try:
        responses = generate(model, tokenizer, task, rows, [prompt.answers for prompt in batch])
    except torch.cuda.OutOfMemoryError as error:
        if len(batch) == 1:
            raise RopeExtendError(
                f"one prompt of {batch[0].length} tokens does not fit the GPU's memory; give shorter "
                "lengths. Finished trials are kept"
            ) from error
        torch.cuda.empty_cache()
        half = len(batch) // 2
        logger.warning("out of memory with %d prompts of %d tokens; halved", len(batch), batch[0].length)
        return [
            *_answer(model, tokenizer, task, batch[:half], crop),
            *_answer(model, tokenizer, task, batch[half:], crop),
        ]
    return [
        Trial(
            prompt.task, prompt.length, prompt.depth, prompt.trial, prompt.distance, prompt.answers, response,
            task.score(response, prompt.answers),
        )
        for prompt, response in zip(batch, responses, strict=True)
    ]  # fmt: skip


def generate(
    model: Any, tokenizer: Any, task: Task, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[str]]
) -> list[str]:
    """Continue token ids greedily, each row until its score is settled; returns what was said, as text.

    Args:
        model: anything with transformers' ``generate``.
        tokenizer: the model's.
        task: how many tokens there are for the answer, and when it is finished.
        rows: token ids of the prompts; shorter ones are padded on the left.
        answers: what each row has to say.
    """
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    width = max(map(len, rows))
    place = input_device(model)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=place)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=place)
    stop = _Settled(tokenizer, task, answers, width)
    own = getattr(model, "generation_config", None)
    ends = own.eos_token_id if own is not None and own.eos_token_id is not None else tokenizer.eos_token_id
    patch = _patch_of(model)
    # All that a checkpoint's own generation config could bend is said here: what is measured is the argmax.
    config = GenerationConfig(
        max_new_tokens=task.new_tokens, do_sample=False, num_beams=1, repetition_penalty=1.0,
        no_repeat_ngram_size=0, pad_token_id=pad, eos_token_id=ends, return_dict_in_generate=False,
        # An encoding by the whole row's length cannot read keys that were cached at a shorter one.
        use_cache=not (patch is not None and patch.encoding.per_row),
    )  # fmt: skip
    model.generate(
        input_ids=ids, attention_mask=mask, generation_config=config,
        stopping_criteria=StoppingCriteriaList([stop]),
    )  # fmt: skip
    return stop.responses


class _Settled(StoppingCriteria):  # type: ignore[misc]
    """Ends a row once no further token can change its score; keeps what it had said by then."""

    def __init__(self, tokenizer: Any, task: Task, answers: Sequence[Sequence[str]], width: int) -> None:
        self.tokenizer, self.task, self.answers, self.width = tokenizer, task, answers, width
        self.responses = [""] * len(answers)
        self.settled = [False] * len(answers)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        said = self.tokenizer.batch_decode(input_ids[:, self.width :], skip_special_tokens=True)
        for row, response in enumerate(said):
            if not self.settled[row]:
                self.responses[row] = response
                self.settled[row] = self.task.finished(response, self.answers[row])
        return torch.tensor(self.settled, device=input_ids.device)


def _patch_of(model: nn.Module) -> Patch | None:
    try:
        return current_patch(model)
    except UnsupportedModelError:  # anything that generates can be measured
        return None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def append_lines(file: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a file of JSON lines; it and its directory are made if need be."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _read_trials(log: str | Path, label: str) -> dict[tuple[str, int, float | None, int], Trial]:
    """Finished trials under a label; a last line that an interruption cut short is removed from the file."""
    path = Path(log)
    found: dict[tuple[str, int, float | None, int], Trial] = {}
    if not path.exists():
        return found
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            values = json.loads(line)
            if values["label"] == label:
                trial = Trial.from_dict(values)
                found[_key(trial)] = trial
        except (ValueError, KeyError, TypeError) as error:
            raise RopeExtendError(f"line {number} of {str(path)!r} is not a trial: {error}") from error
    return found
