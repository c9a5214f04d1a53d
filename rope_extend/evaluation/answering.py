"""One question about one long text, answered by a model as it was and as it is extended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, GenerationConfig, TextStreamer

from rope_extend.checkpoint.hub import local_directory
from rope_extend.checkpoint.info import info
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.record import read_record
from rope_extend.checkpoint.restoring import load_adapter
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import method_encoding
from rope_extend.evaluation.evaluation_mode import evaluation_mode
from rope_extend.evaluation.greedy import greedy
from rope_extend.evaluation.prompts import encode, uses_chat
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import one_error, pretrained
from rope_extend.patching import current_patch, extend
from rope_extend.units import format_length


class Answerer(NamedTuple):
    """A model that is asked: what it is called, and the model with its encoding."""

    label: str
    model: Any


class LongPrompt(NamedTuple):
    """A prompt that fits a window: its token ids, and how many tokens of the text it has, of how many."""

    ids: list[int]
    used: int
    total: int


@dataclass(frozen=True)
class Subjects:
    """The models that answer: a base model, and the same one extended.

    Attributes:
        base: the model whose weights are loaded, a directory or hub id.
        adapter: the directory of a LoRA adapter with its record; None if there is none.
        target_length: the window after the extension in tokens; that of `base` if nothing is extended.
        method: the method that extends `base` without training; None for its own encoding or an adapter.
        trained_length: the pretrained window in tokens.
        tokenizer: where the tokenizer is.
    """

    base: str
    adapter: str | None
    target_length: int
    method: str | None
    trained_length: int
    tokenizer: str

    @classmethod
    def of(
        cls,
        name: str,
        *,
        base_model: str | None = None,
        target_length: int | None = None,
        method: str | None = None,
        trained_length: int | None = None,
    ) -> Subjects:
        """Find out what a name leads to, before any weights are loaded.

        Args:
            name: a run of `finetune` (an adapter with its record), a checkpoint, or a hub id.
            base_model: the adapter's base model; overrides the one in the record.
            target_length: extend a checkpoint without training to this window.
            method: with this method; `yarn` by default.
            trained_length: the pretrained window in tokens, if the config is wrong or does not state it.

        Raises:
            RopeExtendError: no such model, an adapter with a target length, a method or a trained length, a
                base model without an adapter, or a method without a target length.
        """
        if method is not None and target_length is None:
            raise RopeExtendError(f"method={method!r} needs a window to extend to; give target_length=")
        directory = Path(name)
        is_adapter = (directory / "adapter_config.json").exists()
        if not is_adapter:
            if base_model is not None:
                raise RopeExtendError(
                    f"{name} holds no adapter, so it has no base model; leave base_model={base_model!r} out"
                )
            found = info(name, trained_length=trained_length)
            trained = found.shape.trained_length
            if target_length is None:
                return cls(name, None, found.window, None, trained, name)
            if target_length <= trained:
                raise RopeExtendError(
                    f"target_length must exceed the trained window of {trained:,} tokens, got "
                    f"{target_length:,}"
                )
            method = method or "yarn"
            method_encoding(method, found.shape, target_length)  # refuses a name that no method has
            return cls(name, None, target_length, method, trained, name)
        if target_length is not None:
            raise RopeExtendError(
                f"{name} holds an adapter, whose record says its window; leave target_length= and method= out"
            )
        if trained_length is not None:
            raise RopeExtendError(
                f"{name} holds an adapter, whose record says the trained window; leave "
                f"trained_length={trained_length} out"
            )
        record = read_record(local_directory(name))
        base = base_model or record.base_model
        if base is None:
            raise RopeExtendError(
                f"the record {directory / RECORD_NAME} names no base model; give base_model="
            )
        tokenizer = name if (directory / "tokenizer_config.json").exists() else base
        return cls(base, name, record.target_length, None, record.shape.trained_length, tokenizer)

    @property
    def is_extended(self) -> bool:
        """Whether there is a model before and one after."""
        return self.adapter is not None or self.method is not None

    def load_tokenizer(self) -> Any:
        """The tokenizer."""
        return pretrained(AutoTokenizer, self.tokenizer)

    def answerers(self, load_options: LoadOptions, *, before: bool = True) -> Iterator[Answerer]:
        """Load the model once, and yield it as it was, if wanted, and as it is extended.

        Raises:
            RopeExtendError: the model cannot be loaded or extended.
        """
        model = load_options.load(self.base)
        trained = format_length(self.trained_length)
        if not self.is_extended:
            yield Answerer(f"{self.base}, window {format_length(self.target_length)}", model)
            return
        if before:
            yield Answerer(f"before: {self.base}, trained on {trained}", model)
        target = format_length(self.target_length)
        if self.adapter is not None:
            tuned = load_adapter(model, self.adapter).eval()
            patch = current_patch(tuned)
            encoding = patch.encoding if patch else "its own encoding"
            yield Answerer(f"after: {self.adapter}, {encoding}, window {target}", tuned)
            return
        assert self.method is not None
        with extend(model, self.target_length, self.method, trained_length=self.trained_length) as patch:
            yield Answerer(f"after: {patch.encoding} without training, window {target}", model)


def long_prompt(
    tokenizer: Any, text: str, question: str | None, most: int, *, chat: str = "auto"
) -> LongPrompt:
    """Put a text and a question into one prompt of at most `most` tokens; the end of the text is cut off.

    Args:
        tokenizer: the model's tokenizer.
        text: the long text.
        question: asked after the text; None lets the model continue the text.
        most: tokens that the prompt may have.
        chat: `auto` uses the tokenizer's chat template if there is one and a question; `on` or `off`.

    Raises:
        RopeExtendError: not even the question fits, or there is no chat template to turn on.
    """
    template = question is not None and uses_chat(tokenizer, chat)

    def ids_of(part: str) -> list[int]:
        if question is None:
            return encode(tokenizer, part, False)
        if not template:
            return encode(tokenizer, f"{part}\n\nQuestion: {question}\nAnswer:", False)
        turn = [{"role": "user", "content": f"{part}\n\n{question}"}]
        with one_error("the tokenizer's chat template fails", "Leave it out: --no-chat, or chat='off'"):
            written = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return encode(tokenizer, written, True)

    def tokens_of(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    whole = ids_of(text)
    if len(whole) <= most:
        return LongPrompt(whole, tokens_of(text), tokens_of(text))
    # By characters: decoding a part of the tokens does not give the text back with every tokenizer.
    low, few, high, many = 0, len(ids_of("")), len(text), len(whole)
    fitting: list[int] = []
    for _ in range(_TRIALS):
        if few > most or high - low < 2 or most - len(fitting) <= _SLACK:
            break
        guess = low + round((high - low) * (most - few) / (many - few))
        size = min(max(guess, low + 1), high - 1)
        ids = ids_of(text[:size])
        if len(ids) <= most:
            low, few, fitting = size, len(ids), ids
        else:
            high, many = size, len(ids)
    if not fitting:
        raise RopeExtendError(
            f"the question leaves no room for the text in a prompt of {most:,} tokens; ask a shorter "
            "question, for a shorter answer, or give a longer target_length"
        )
    return LongPrompt(fitting, tokens_of(text[:low]), tokens_of(text))


_TRIALS, _SLACK = 24, 4
"""Attempts to fill a prompt, and the tokens that may stay free."""


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Hands each finished piece of text to a function."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def answer(
    model: Any, tokenizer: Any, ids: list[int], new_tokens: int, write: Callable[[str], object] | None = None
) -> str:
    """The most likely continuation of a prompt, token by token, whatever the model's generation config says.

    Args:
        model: a causal language model, patched or not.
        tokenizer: the model's tokenizer.
        ids: token ids of the prompt.
        new_tokens: the most tokens of the answer.
        write: gets the text piece by piece while it is generated.

    Raises:
        RopeExtendError: the prompt does not fit into memory.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    first = ends[0] if isinstance(ends, list) else ends
    patch = current_patch(model)
    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, num_beams=1, eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else first or 0,
        # If the table depends on the length of the row, keys that were cached at a shorter length are wrong.
        use_cache=not (patch is not None and patch.encoding.per_row),
    )  # fmt: skip
    with evaluation_mode(model) as device, torch.no_grad(), greedy(model):
        prompt = torch.tensor([ids], device=device)
        try:
            output = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config,
                streamer=None if write is None else _Streamer(tokenizer, write),
            )  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise RopeExtendError(
                f"a prompt of {len(ids):,} tokens does not fit into memory; use less text (max_tokens=), a "
                "smaller dtype, or quantize='4bit'"
            ) from error
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
