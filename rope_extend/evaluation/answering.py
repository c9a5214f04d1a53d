"""Greedy answers to prompts, in batches."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextStreamer

from rope_extend.attention.registry import without_cudnn
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import chunked_forward
from rope_extend.evaluation.loss_computer import LossComputer, evaluation_mode, peak_memory_bytes
from rope_extend.evaluation.prompts import Prompt, Task, encode, last_tokens, prompts_fingerprint
from rope_extend.loss import output_head
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.models.decoders import CACHE, unwrap
from rope_extend.models.load_options import input_device

logger = logging.getLogger(__name__)


def generate(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    finished: Callable[[int, str], bool] = lambda *_: False,
    write: Callable[[str], object] | None = None,
) -> list[str]:
    """Continue token ids by the most likely tokens, whatever the model's generation config says.

    Args:
        rows: token ids of the prompts; shorter ones are padded on the left.
        new_tokens: the most new tokens of a row.
        finished: takes the number of a row and its new text; whether it needs no more tokens.
        write: gets the new text of a single row piece by piece.
    """
    lm, device = unwrap(model), input_device(model)
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    ends = getattr(lm.generation_config, "eos_token_id", None)
    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, num_beams=1, pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends,
    )  # fmt: skip
    more: dict[str, Any] = {}
    if bool(mask.all()):  # else padding would have to be hidden from the chunks
        more = {CACHE: filled_cache(model, ids, new_tokens)}
    if write is not None:
        more["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        more["streamer"].on_finalized_text = lambda text, stream_end=False: write(text)

    def texts(output: Tensor) -> list[str]:
        return list(tokenizer.batch_decode(output[:, width:], skip_special_tokens=True))

    with _no_defaults(lm), ExitStack() as stack:
        stop = _Stop(stack, lambda output: [finished(n, text) for n, text in enumerate(texts(output))])
        output = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config,
            stopping_criteria=StoppingCriteriaList([stop]), **more,
        )  # fmt: skip
    return texts(output)


@contextmanager
def _no_defaults(lm: Any) -> Iterator[None]:
    """Within the block, `generate` uses nothing of the checkpoint's generation config.

    It would take all that it is not given from there: penalties and forbidden tokens, which change the
    answer, or a kind of cache.
    """
    own = lm.generation_config
    lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        lm.generation_config = own


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends finished rows. After the first token, attention builds no plan for each number of keys."""

    def __init__(self, stack: ExitStack, finished: Callable[[Tensor], list[bool]]) -> None:
        self.stack, self.finished, self.decodes = stack, finished, False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self.decodes:
            self.decodes = True
            self.stack.enter_context(without_cudnn())
        return torch.tensor(self.finished(input_ids), device=input_ids.device)


def filled_cache(model: Any, ids: Tensor, new_tokens: int) -> DynamicCache | None:
    """The cache of all tokens but the last of long prompts `[B, T]`, from which `generate` continues.

    It is filled in chunks, so that activations stay small: `generate` processes prompts whole, and for an 8B
    model at 262k tokens the MLPs alone then need 29 GB. None for prompts of up to 131,072 tokens, and for
    models that give other results in chunks.
    """
    tokens = ids.shape[1]
    if tokens <= chunked_forward.MAX_WHOLE:
        return None
    computer = LossComputer(model, ids.device)
    size = computer.chunked.default_chunk(tokens)
    if size >= tokens or not computer.can_chunk(tokens, size):
        return None
    cache = computer.chunked.cache_of(tokens + new_tokens)
    for _ in computer.chunked.with_cache(torch.split(ids[:, :-1], size, dim=1), cache):
        pass  # the states are not needed: the last token gives the first logits
    return cache


def answer_batch(
    model: nn.Module, tokenizer: Any, task: Task, batch: Sequence[Prompt], crop: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Let a model answer prompts of one task and length together, and score the answers.

    Args:
        crop: number of a prompt's last tokens that the model sees, including those of the answer. This is the
            control for a longer context.

    Returns:
        For each prompt, what identifies it, `response` and `score`, as plain values; and the peak memory.
    """
    with evaluation_mode(model) as device, torch.no_grad():
        responses = _responses(model, tokenizer, task, batch, crop)
        peak = peak_memory_bytes(device)
    names = ("task", "length", "depth", "drawn", "trial", "answers")
    trials = [
        {
            **{name: getattr(prompt, name) for name in names},
            "response": response,
            "score": task.score(response, prompt.answers),
            "prompt": prompts_fingerprint([prompt]),
        }
        for prompt, response in zip(batch, responses, strict=True)
    ]
    return trials, peak


def _responses(
    model: nn.Module, tokenizer: Any, task: Task, batch: Sequence[Prompt], crop: int | None
) -> list[str]:
    """The answers to a batch of prompts; if memory runs out, to one half after the other."""
    bos = tokenizer.bos_token_id
    rows = [
        last_tokens(encode(tokenizer, prompt.text, prompt.chat), prompt.visible(crop), bos)
        for prompt in batch
    ]
    try:
        if task.in_place:
            return [_in_place(model, tokenizer, *each) for each in zip(batch, rows, strict=True)]
        return generate(
            model, tokenizer, rows, task.new_tokens,
            finished=lambda number, text: task.finished(text, batch[number].answers),
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if len(batch) == 1:
            raise RopeExtendError(
                f"one prompt of {batch[0].length} tokens does not fit into the memory; use shorter lengths. "
                "Finished trials are kept"
            ) from error
    # Outside the handler, because the traceback keeps tensors alive until here.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(batch) // 2
    logger.warning(
        "out of memory with %d prompts of %d tokens; the batch is halved", len(batch), batch[0].length
    )
    return [
        *_responses(model, tokenizer, task, batch[:half], crop),
        *_responses(model, tokenizer, task, batch[half:], crop),
    ]


def _in_place(model: nn.Module, tokenizer: Any, prompt: Prompt, row: Sequence[int]) -> str:
    """The most likely tokens in place of each answer at the end of a prompt, one answer in a line.

    An answer that is one word would be generated if and only if all its tokens are the most likely ones.
    `row` has the token ids that the model sees.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise RopeExtendError(f"{prompt.task} needs a tokenizer of the library tokenizers; load a fast one")
    spans = tokenizer(
        prompt.text, add_special_tokens=not prompt.chat, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    text, places = prompt.text, []
    for answer in reversed(prompt.answers):
        start = text.rindex(f" {answer}") + 1
        end = start + len(answer)
        places.append(
            [n - prompt.tokens for n, (low, high) in enumerate(spans) if low < end and high > start]
        )
        text = text[: start - 1]
    if 1 - places[-1][0] > len(row):
        raise RopeExtendError(
            f"the {len(places)} questions of {prompt.task} need {1 - places[-1][0]} tokens, and the model "
            f"sees {len(row)}; leave the rows with a cropped context out (--no-cropped), or use another task"
        )
    computer = LossComputer(model, input_device(model))
    states = torch.cat([*computer.hidden(torch.tensor([row], device=computer.device))], dim=1)
    # The state at t predicts the token at t + 1.
    head = output_head(model)
    found = [head(states[:, [n - 1 for n in place]])[0].argmax(-1) for place in reversed(places)]
    return "\n".join(" ".join(tokenizer.decode(ids).split()) for ids in found)
