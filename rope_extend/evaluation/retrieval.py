"""Retrieval over depth and length: can the model answer a question about a detail of a long text?

Every model gets the same prompts, each with an exact number of tokens. So the prompts of one task and length
are equally long and are answered in batches without padding. Answers are greedy, use a cache, and stop once
the score cannot change.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from rope_extend.attention.registry import without_cudnn
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import BATCH_TOKENS
from rope_extend.evaluation.evaluation_mode import evaluation_mode
from rope_extend.evaluation.greedy import greedy
from rope_extend.evaluation.identity import active_patch
from rope_extend.evaluation.long_prompts import filled_cache
from rope_extend.evaluation.loss_computer import peak_memory_bytes
from rope_extend.evaluation.prompts import Prompt, PromptOptions, Task, encode, last_tokens, make_prompt
from rope_extend.evaluation.results import Cell, RetrievalResult
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.models.load_options import input_device
from rope_extend.progress import progress_bar
from rope_extend.units import parse_lengths

logger = logging.getLogger(__name__)

TrialKey = tuple[str, int, float | None, int]
"""Task, length in tokens, depth, and number of a trial."""


@dataclass(frozen=True)
class Trial:
    """One answered prompt. The fields are those of `Prompt`; `score` is between 0 and 1."""

    task: str
    length: int
    depth: float | None
    trial: int
    distance: int | None
    answers: tuple[str, ...]
    response: str
    score: float


def make_prompts(
    tasks: Sequence[Task],
    tokenizer: Any,
    lengths: int | str | Sequence[int | str],
    *,
    options: PromptOptions | None = None,
    progress: bool = True,
) -> list[Prompt]:
    """Write all prompts of a run: for each task and length, those of `PromptOptions.trials_of`.

    Args:
        tasks: kinds of prompts.
        tokenizer: the model's tokenizer.
        lengths: tokens of prompt and answer, such as 4096 or `"4k"`.
        options: depths, number of trials, seed and chat template.
        progress: show a progress bar, on terminals only.

    Raises:
        RopeExtendError: no task, no length, or a task does not fit a length.
    """
    options = options or PromptOptions()
    how: dict[str, Any] = {"seed": options.seed, "chat": options.chat}
    sizes = parse_lengths(lengths)
    if not tasks or not sizes:
        raise RopeExtendError("retrieval needs at least one task and one length")
    trials: list[tuple[Task, int, float | None, int]] = []
    for task in tasks:
        for size in sizes:
            make_prompt(task, tokenizer, size, **how)  # refuses at once what does not fit
            trials += [(task, size, depth, trial) for depth, trial in options.trials_of(task)]
    bar = tqdm(trials, desc="prompts", unit="prompt", disable=None if progress else True)
    return [make_prompt(task, tokenizer, size, depth, trial, **how) for task, size, depth, trial in bar]


def answer_prompts(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[Task],
    prompts: Sequence[Prompt],
    *,
    crop: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = True,
) -> RetrievalResult:
    """Let a model answer prompts, and score the answers.

    Args:
        model: a causal language model, patched or not, with or without an adapter; unchanged afterwards.
        tokenizer: the model's tokenizer.
        tasks: the tasks of the prompts.
        prompts: the prompts, from `make_prompts`.
        crop: number of a prompt's last tokens that the model sees, including those of the answer. This is the
            control for a longer context.
        batch_tokens: prompt tokens that are answered together.
        progress: show a progress bar; where there is no terminal, a line in the log now and then.

    Raises:
        RopeExtendError: an argument out of range, or a prompt that does not fit into the GPU's memory alone.
    """
    if batch_tokens < 1:
        raise RopeExtendError(f"batch_tokens must be at least 1, got {batch_tokens}")
    by_name = {task.name: task for task in tasks}
    answer_tokens = max((task.new_tokens for task in tasks), default=0)
    if crop is not None and crop <= answer_tokens:
        raise RopeExtendError(f"crop must exceed the {answer_tokens} tokens of the answer, got {crop}")
    started = time.perf_counter()
    trials: dict[TrialKey, Trial] = {}
    tokens = sum(visible_tokens(prompt, crop) for prompt in prompts)
    bar = progress_bar(logger, shown=progress, total=tokens, desc="retrieval", unit="tok", unit_scale=True)
    with evaluation_mode(model) as device, torch.no_grad(), bar:
        for batch in _batches(prompts, batch_tokens, crop):
            answered = _answer(model, tokenizer, by_name[batch[0].task], batch, crop)
            trials |= {_key(trial): trial for trial in answered}
            bar.update(sum(visible_tokens(prompt, crop) for prompt in batch))
        peak = peak_memory_bytes(device)
    return RetrievalResult(
        cells=_cells(prompts, trials),
        crop=crop,
        seconds=time.perf_counter() - started,
        forward_tokens=tokens,
        peak_memory_bytes=peak,
    )


def answer_batch(
    model: nn.Module, tokenizer: Any, task: Task, batch: Sequence[Prompt], crop: int | None = None
) -> tuple[list[Trial], int]:
    """Let a model answer prompts of one task and length together; returns the trials and the peak memory.

    Args:
        model: a causal language model, patched or not; unchanged afterwards.
        tokenizer: its tokenizer.
        task: the task of the prompts.
        batch: the prompts.
        crop: as for `answer_prompts`.

    Raises:
        RopeExtendError: a prompt does not fit into the GPU's memory alone.
    """
    with evaluation_mode(model) as device, torch.no_grad():
        return _answer(model, tokenizer, task, batch, crop), peak_memory_bytes(device)


def _cells(prompts: Sequence[Prompt], trials: dict[TrialKey, Trial]) -> tuple[Cell, ...]:
    """The scores of the prompts, one cell for each task, length and depth."""
    groups: dict[tuple[str, int, float | None], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.task, prompt.length, prompt.depth), []).append(prompt)
    cells = []
    for key, group in groups.items():
        distance = min((p.distance for p in group if p.distance is not None), default=None)
        scores = tuple(trials[_key(prompt)].score for prompt in group)
        cells.append(Cell(*key, distance, scores, prompts_fingerprint(group)))
    return tuple(cells)


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Sixteen hex digits that identify these prompts and their expected answers, in this order."""
    return joined_fingerprint(
        hashlib.sha256(json.dumps([each.text, each.answers, each.tokens]).encode()).hexdigest()[:16]
        for each in prompts
    )


def joined_fingerprint(fingerprints: Iterable[str]) -> str:
    """Sixteen hex digits for several fingerprints in this order; a single one stays as it is."""
    several = list(fingerprints)
    return several[0] if len(several) == 1 else hashlib.sha256("".join(several).encode()).hexdigest()[:16]


def _key(trial: Prompt | Trial) -> TrialKey:
    return trial.task, trial.length, trial.depth, trial.trial


def visible_tokens(prompt: Prompt, crop: int | None) -> int:
    """Number of a prompt's tokens that the model sees. The tokens reserved for the answer count in `crop`."""
    return prompt.tokens if crop is None else min(prompt.tokens, crop - (prompt.length - prompt.tokens))


def _batches(prompts: Sequence[Prompt], batch_tokens: int, crop: int | None) -> list[list[Prompt]]:
    """Batches of prompts of one task and length, with at most `batch_tokens` tokens or one prompt."""
    groups: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.task, prompt.length), []).append(prompt)
    batches = []
    for group in groups.values():
        rows = max(1, batch_tokens // visible_tokens(group[0], crop))
        batches += [group[start : start + rows] for start in range(0, len(group), rows)]
    return batches


def _answer(
    model: nn.Module, tokenizer: Any, task: Task, batch: Sequence[Prompt], crop: int | None
) -> list[Trial]:
    """Answer a batch of prompts; if memory runs out, one half after the other."""
    rows = [
        last_tokens(
            encode(tokenizer, prompt.text, prompt.chat), visible_tokens(prompt, crop), tokenizer.bos_token_id
        )
        for prompt in batch
    ]
    responses: list[str] | None = None
    try:
        responses = generate(model, tokenizer, task, rows, [prompt.answers for prompt in batch])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if len(batch) == 1:
            raise RopeExtendError(
                f"one prompt of {batch[0].length} tokens does not fit into the GPU's memory; use shorter "
                "lengths. Finished trials are kept"
            ) from error
    if responses is None:  # outside the handler, because the traceback keeps tensors alive until here
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(batch) // 2
        logger.warning(
            "out of memory with %d prompts of %d tokens; the batch is halved", len(batch), batch[0].length
        )
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
    """Continue token ids greedily, each row until its score cannot change; returns the new text.

    Args:
        model: any model with transformers' `generate`.
        tokenizer: the model's tokenizer.
        task: the task, which knows the tokens reserved for the answer and when an answer is complete.
        rows: token ids of the prompts; shorter ones are padded on the left.
        answers: the expected answers of each row.
    """
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    width = max(map(len, rows))
    device = input_device(model)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    stop = _ScoreIsFinal(tokenizer, task, answers, width)
    defaults = getattr(model, "generation_config", None)
    eos = tokenizer.eos_token_id
    if defaults is not None and defaults.eos_token_id is not None:
        eos = defaults.eos_token_id
    config = GenerationConfig(
        max_new_tokens=task.new_tokens, do_sample=False, pad_token_id=pad, eos_token_id=eos,
        # If the table depends on the length of the row, keys that were cached at a shorter length are wrong.
        use_cache=not _is_per_row(model),
    )  # fmt: skip
    more = {}
    if config.use_cache and bool(mask.all()):  # else padding would have to be hidden from the chunks
        cache = filled_cache(model, ids, task.new_tokens)
        more = {} if cache is None else {"past_key_values": cache}
    with greedy(model), ExitStack() as stack:
        model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, **more,
            stopping_criteria=StoppingCriteriaList([stop, _AfterThePrompt(stack)]),
        )  # fmt: skip
    return stop.responses


class _AfterThePrompt(StoppingCriteria):  # type: ignore[misc]
    """Ends no row. After the first token, attention no longer builds a plan for each number of keys."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.entered = stack, False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.entered:
            self.entered = True
            self.stack.enter_context(without_cudnn())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _ScoreIsFinal(StoppingCriteria):  # type: ignore[misc]
    """Ends a row once more tokens cannot change its score, and keeps its response up to then."""

    def __init__(self, tokenizer: Any, task: Task, answers: Sequence[Sequence[str]], width: int) -> None:
        self.tokenizer, self.task, self.answers, self.width = tokenizer, task, answers, width
        self.responses = [""] * len(answers)
        self.final = [False] * len(answers)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.width :], skip_special_tokens=True)
        for row, response in enumerate(texts):
            if not self.final[row]:
                self.responses[row] = response
                self.final[row] = self.task.finished(response, self.answers[row])
        return torch.tensor(self.final, device=input_ids.device)


def _is_per_row(model: nn.Module) -> bool:
    patch = active_patch(model)
    return patch is not None and patch.encoding.per_row
