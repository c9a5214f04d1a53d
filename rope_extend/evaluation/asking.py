"""One question about one long text, before and after an extension."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rope_extend.checkpoint.restoring import checked_record
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.answering import generate
from rope_extend.evaluation.candidates import Candidates
from rope_extend.evaluation.evaluation_config import AS_IS, ModelConfig
from rope_extend.evaluation.loss_computer import evaluation_mode
from rope_extend.evaluation.prompts import encode, uses_chat
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.models.checkpoint_directory import TOKENIZER_CONFIG, is_adapter
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import one_error
from rope_extend.models.locating import base_name
from rope_extend.patching import current_patch
from rope_extend.units import format_length


def answer(
    model: Any, tokenizer: Any, ids: list[int], new_tokens: int, write: Callable[[str], object] | None = None
) -> str:
    """The continuation of one prompt; the arguments are those of `generate`."""
    try:
        with evaluation_mode(model), torch.no_grad():
            return generate(model, tokenizer, [ids], new_tokens, write=write)[0]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RopeExtendError(
            f"a prompt of {len(ids):,} tokens does not fit into memory; use less text (max_tokens=), a "
            "smaller dtype, or quantize='4bit'"
        ) from error


class LongPrompt(NamedTuple):
    """A prompt that fits a window: its token ids, and how many tokens of the text it has, of how many."""

    ids: list[int]
    used: int
    total: int


def long_prompt(
    tokenizer: Any, text: str, question: str | None, most: int, *, chat: str = "auto"
) -> LongPrompt:
    """Put a text and a question into one prompt of at most `most` tokens; the end of the text is cut off.

    Args:
        question: asked after the text; None lets the model continue the text.
        chat: `auto` uses the tokenizer's chat template if there is one and a question; `on` or `off`.
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

    kept, ids = text, ids_of(text)
    if len(ids) > most:
        # By characters: decoding a part of the tokens does not give the text back with every tokenizer.
        fitting = bisect_right(range(len(text)), most, key=lambda size: len(ids_of(text[:size])))
        if fitting < 2:
            raise RopeExtendError(
                f"the question leaves no room for the text in a prompt of {most:,} tokens; ask a shorter "
                "question, for a shorter answer, or give a longer target_length"
            )
        kept = text[: fitting - 1]
        ids = ids_of(kept)
    return LongPrompt(ids, tokens_of(kept), tokens_of(text))


@dataclass(frozen=True)
class Subjects:
    """The models that answer a question: a base model, and the same one extended.

    Attributes:
        candidates: the base model, and the adapter or the method that extends it, if any.
        window: the window after the extension in tokens; that of the base model if nothing is extended.
        tokenizer: where the tokenizer is.
    """

    candidates: Candidates
    window: int
    tokenizer: str

    @classmethod
    def of(
        cls,
        name: str,
        load_options: LoadOptions,
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
        """
        if method is not None and target_length is None:
            raise RopeExtendError(f"method={method!r} needs a window to extend to; give target_length=")
        directory, adapter = Path(name), is_adapter(Path(name))
        others = {"target_length=": target_length, "trained_length=": trained_length}
        for option, value in (others if adapter else {"base_model=": base_model}).items():
            if value is not None:
                holds = "an adapter, whose record says its windows" if adapter else "no adapter"
                raise RopeExtendError(f"{name} holds {holds}; leave {option} out")
        if not adapter:
            methods = (AS_IS,) if target_length is None else (AS_IS, method or "yarn")
            lengths = None if target_length is None else (target_length,)
            config = ModelConfig(name, methods=methods, lengths=lengths, trained_length=trained_length)
            candidates = Candidates.of(config, load_options)
            return cls(candidates, target_length or candidates.info.window, name)
        record = checked_record(directory, check_files=True)
        base = base_name(*record.base(directory, base_model))
        config = ModelConfig(base, (name,), (AS_IS,), trained_length=record.shape.trained_length)
        tokenizer = name if (directory / TOKENIZER_CONFIG).exists() else base
        return cls(Candidates.of(config, load_options), record.target_length, tokenizer)

    @property
    def is_extended(self) -> bool:
        """Whether there is a model before and one after."""
        return len(self.candidates.rows) > 1

    def models(self, *, before: bool = True) -> Iterator[tuple[str, Any]]:
        """Load the model once; yield a label and the model as it was, if wanted, and as it is extended."""
        candidates, window = self.candidates, format_length(self.window)
        model = candidates.load_options.load(candidates.name)
        if not self.is_extended:
            yield f"{candidates.name}, window {window}", model
            return
        candidates.check_adapters(model, candidates.rows)  # before the first answer
        if before:
            yield f"before: {candidates.name}, trained on {format_length(candidates.trained_length)}", model
        row = candidates.rows[-1]
        with candidates.prepared(model, row) as extended:
            patch = current_patch(extended)
            encoding = patch.encoding if patch else "its own encoding"
            how = f"{row.adapter}, {encoding}" if row.adapter else f"{encoding} without training"
            yield f"after: {how}, window {window}", extended
