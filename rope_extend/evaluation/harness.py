"""EleutherAI's lm-evaluation-harness on extended models: its tasks, with our encodings and little memory.

The harness is an optional package: `pip install 'lm_eval[ruler,longbench]'`. Importing this module needs it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import evaluator, tasks
from lm_eval._cli.harness import HarnessCLI
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from rope_extend.attention.registry import without_cudnn
from rope_extend.checkpoint.opening import load_any, load_tokenizer
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.answering import filled_cache
from rope_extend.evaluation.loss_computer import LossComputer, evaluation_mode
from rope_extend.loss import output_head
from rope_extend.models.config_facts import current_window
from rope_extend.models.decoders import unwrap
from rope_extend.models.load_options import LoadOptions, input_device
from rope_extend.patching import current_patch, extend

logger = logging.getLogger(__name__)

NAME = "rope_extend"
"""The name of the model in the harness."""
Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, and the token ids of each."""


@register_model(NAME)
class ExtendedLM(HFLM):  # type: ignore[misc]
    """A model of the harness that is loaded by `load_any`, and scored without the logits of its whole window.

    Args:
        pretrained: whatever `load_any` loads.
        base_model: the base model of an adapter; overrides the one in its record.
        method: extend the model by this method, without training, to `target_length`.
        max_length: the window in tokens; by default that of the model.
        device: such as `cpu`; the harness' default, its first GPU, leaves the choice to `load_any`.
        more: as `HFLM` takes them. Without BOS and EOS, `prefix_token_id` is a line break by default.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        base_model: str | None = None,
        method: str | None = None,
        target_length: int | str | None = None,
        max_length: int | None = None,
        device: str | None = None,
        **more: Any,
    ) -> None:
        if (method is None) != (target_length is None):
            raise RopeExtendError(
                f"method and target_length belong together; got {method!r} and {target_length!r}"
            )
        options = None if device in (None, "cuda", "cuda:0") else LoadOptions(device=device)
        model = load_any(pretrained, base_model=base_model, options=options)
        if method is not None and target_length is not None:
            extend(model, target_length, method)
        patch = current_patch(model)
        window = max_length or (patch.target_length if patch else current_window(unwrap(model).config))
        tokenizer = load_tokenizer(pretrained)
        if {more.get("prefix_token_id"), tokenizer.bos_token_id, tokenizer.eos_token_id} == {None}:
            more["prefix_token_id"] = _line_break(tokenizer)
        super().__init__(model, tokenizer=tokenizer, max_length=window, **more)
        self._device = input_device(model)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """The text of tokens; None for a missing EOS, which the harness would look for in the answers."""
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the most likely one, one after the other.

        The harness' own method holds logits and probabilities of all tokens, 67 GB for a window of 128k.
        """
        with evaluation_mode(self.model) as device, torch.no_grad():
            computer, found = LossComputer(self.model, device), []
            for text, context, continuation in tqdm(requests, disable=disable_tqdm):
                if len(continuation) > self.max_length:  # a part of it would be scored
                    raise RopeExtendError(
                        f"a continuation of {len(continuation)} tokens does not fit into the window of "
                        f"{self.max_length}; give a longer max_length or window, or leave the task out"
                    )
                found.append(self._score(computer, context, continuation))
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, found[-1])
        return found

    def _score(
        self, computer: LossComputer, context: list[int], continuation: list[int]
    ) -> tuple[float, bool]:
        tokens = torch.tensor([*context, *continuation][-(self.max_length + 1) :], device=computer.device)
        first, start = len(tokens) - len(continuation), 0
        piece = max(1, computer.chunk_bytes // (4 * computer.vocabulary))
        total, likely = 0.0, True
        for states in computer.hidden(tokens[None, :-1]):
            for low in range(max(start, first - 1), start + states.shape[1], piece):
                high = min(low + piece, start + states.shape[1])
                # The state at t predicts the token at t + 1.
                logits = output_head(self.model)(states[:, low - start : high - start])[0].float()
                targets = tokens[low + 1 : high + 1].to(logits.device)
                total -= float(cross_entropy(logits, targets, reduction="sum"))
                likely &= bool((logits.argmax(-1) == targets).all())
            start += states.shape[1]
        return total, likely

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **more: Any) -> Any:
        """The answers to a batch of prompts; one long prompt is processed in chunks."""
        mask = more.get("attention_mask")
        if mask is None or bool(mask.all()):  # else padding would have to be hidden from the chunks
            with evaluation_mode(self.model), torch.no_grad():
                cache = filled_cache(self.model, context, max_length - context.shape[1])
            more |= {} if cache is None else {"past_key_values": cache}
        with without_cudnn():
            return super()._model_generate(context, max_length, stop, **more)


def _line_break(tokenizer: Any) -> int:
    """The token that stands before the first one that is scored, if there is neither BOS nor EOS."""
    ids = tokenizer.encode("\n", add_special_tokens=False)
    if not ids:
        raise RopeExtendError(
            "the tokenizer has no BOS, no EOS and no line break, and the first token of a text is scored "
            "after one of them; give another token, as --model_args prefix_token_id=0"
        )
    logger.warning("the tokenizer has no BOS and no EOS: a line break stands before the text that is scored")
    return int(ids[-1])


class _Tasks(tasks.TaskManager):  # type: ignore[misc]
    """The tasks of the harness; names those that make no prompts, so no length changes them."""

    def load(self, names: Any) -> Any:
        loaded = super().load(names)
        given = [name for name, task in loaded["tasks"].items() if not callable(task.config.custom_dataset)]
        if given and "max_seq_lengths" in self.metadata:
            logger.warning("--lengths is ignored by %s: it is for tasks like ruler", ", ".join(given[:9]))
        return loaded


def run_harness(model: Mapping[str, Any], lengths: Sequence[int], words: Sequence[str]) -> None:
    """Run `lm-eval run` on a model, which the arguments of `ExtendedLM` name.

    `lengths` are those of tasks that make their own prompts, such as `ruler`, in tokens; `words` are all
    other arguments of the harness, as on its command line.
    """
    if not {"--tasks", "-t", "--config", "-C"} & {word.partition("=")[0] for word in words}:
        raise RopeExtendError("lm-eval needs --tasks, such as --tasks ruler; `lm-eval ls tasks` lists them")
    tasks.TaskManager = _Tasks
    if not any((path / ".git").exists() for path in (Path.cwd(), *Path.cwd().parents)):
        evaluator.get_git_commit_hash = lambda: None  # as found there, without git's complaint
    harness = HarnessCLI()
    arguments = harness._parser.parse_args(["run", *words])
    with tempfile.TemporaryDirectory() as directory:
        # Tasks that make prompts of a length load the tokenizer by its name.
        load_tokenizer(model["pretrained"]).save_pretrained(directory)
        known = {"tokenizer": directory, **({"max_seq_lengths": list(lengths)} if lengths else {})}
        arguments.metadata = known | (arguments.metadata or {})
        arguments.model, arguments.model_args = NAME, dict(model) | (arguments.model_args or {})
        try:
            harness.execute(arguments)
        except ValueError as error:
            if not str(error).startswith("Tasks not found"):
                raise
            raise RopeExtendError(f"{error}; `lm-eval ls tasks` lists them") from error
