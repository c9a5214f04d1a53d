"""Next-token loss that never holds the logits of the whole window; training and evaluation both use it.

At 128k tokens and a vocabulary of 128k, the logits of one document are 64 GiB in float32, while its last
hidden states are 1 GiB. So the decoder runs once over the window, and the head runs over a few tokens at a
time; in training each piece of logits is computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rope_extend.errors import RopeExtendError
from rope_extend.inspection import unwrap

CHUNK_BYTES = 64 * 2**20
"""Default budget for the float32 logits that exist at one time, in bytes."""

IGNORED = -100
"""Label of a token that is not scored, as everywhere in transformers."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Turns hidden states ``[B, T, D]`` into logits ``[B, T, V]``, both in the model's dtype."""


class NextTokenLoss(torch.nn.Module):
    """A model and its loss as one module, for whatever wraps a module's forward.

    DistributedDataParallel synchronises gradients, and accelerate casts under autocast, only for what goes
    through the forward of the module they were given. ``accelerator.prepare(NextTokenLoss(model))`` puts
    decoder and loss inside it.
    """

    def __init__(self, model: torch.nn.Module, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__()
        self.model = model
        self.chunk_bytes = chunk_bytes

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor:
        """Return :func:`next_token_loss` of the model, a float32 scalar."""
        return next_token_loss(self.model, input_ids, labels, chunk_bytes=self.chunk_bytes, **inputs)


def next_token_loss(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    **inputs: Any,
) -> torch.Tensor:
    """Mean next-token loss in nats, a differentiable float32 scalar, equal to the model's own.

    Args:
        model: a causal language model of transformers, with or without PEFT.
        input_ids: int64 ``[B, T]``.
        labels: int64 ``[B, T]``, not shifted, -100 where a token is not scored; ``input_ids`` if not given.
        chunk_bytes: how many bytes of float32 logits may exist at one time.
        inputs: further inputs of the decoder, such as ``position_ids`` or ``attention_mask``.

    Returns:
        The mean over all scored tokens of the batch; zero if there are none. The auxiliary router loss that
        a mixture-of-experts model adds with ``output_router_logits=True`` is not part of it.

    Raises:
        RopeExtendError: if the model is not a causal language model, or is wrapped in
            DistributedDataParallel while gradients are on: then wrap :class:`NextTokenLoss` instead.
    """
    if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        raise RopeExtendError(
            "the model is wrapped in DistributedDataParallel, whose gradients would not be synchronised, "
            "because the loss does not go through its forward; wrap NextTokenLoss(model) in it instead"
        )
    hidden = hidden_states(model, input_ids, **inputs)
    # Position t predicts token t + 1; the last position has nothing to predict.
    targets = F.pad((input_ids if labels is None else labels)[:, 1:], (0, 1), value=IGNORED)
    losses = token_losses(hidden, output_head(model), targets, chunk_bytes=chunk_bytes)
    return losses.sum() / (targets != IGNORED).sum().clamp(min=1).to(losses.device)


def token_losses(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, *, chunk_bytes: int = CHUNK_BYTES
) -> torch.Tensor:
    """Negative log-likelihood of each target in nats, float32 ``[B, T]``; zero where the target is -100.

    The product with the head is taken in the model's dtype, as the model does itself, and the log-sum-exp
    in float32. Where gradients are on, no chunk's logits are kept for the backward pass.

    Args:
        hidden: the decoder's last hidden states ``[B, T, D]``.
        head: from :func:`output_head`, or any function from hidden states to logits.
        targets: int64 ``[B, T]``; ``targets[b, t]`` is what ``hidden[b, t]`` predicts, so already shifted.
        chunk_bytes: how many bytes of float32 logits may exist at one time; one token at least.
    """
    rows = hidden.flatten(0, 1)  # [B·T, D]
    vocabulary = head(rows[None, :1]).shape[-1]
    size = max(1, chunk_bytes // (4 * vocabulary))
    # split, and not a slice for each chunk: its backward pass writes the gradient of `hidden` only once.
    pieces = zip(torch.split(rows, size), torch.split(targets.to(rows.device).flatten(), size), strict=True)
    if torch.is_grad_enabled():
        losses = [checkpoint(_losses, head, *piece, use_reentrant=False) for piece in pieces]
    else:
        losses = [_losses(head, *piece) for piece in pieces]
    return torch.cat(losses).view(targets.shape)


def _losses(head: Head, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = head(rows[None])[0].float()
    # A head may be on another device than the layers: then hooks have brought the states to it.
    return F.cross_entropy(logits, targets.to(logits.device), reduction="none", ignore_index=IGNORED)


def hidden_states(model: torch.nn.Module, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Last hidden states ``[B, T, D]`` of a causal language model, in its dtype: what its head reads.

    Adapters and patches stay active, nothing is cached, and no attention mask over all pairs is built where
    the model's attention can do without. Each row is one text, whatever its ``position_ids``.
    """
    lm = causal_lm(model)
    if inputs.get("position_ids") is not None and inputs.get("attention_mask") is None:
        # Else transformers takes every gap in the positions for the seam between two packed texts, and
        # lets no token look across it.
        inputs["attention_mask"] = torch.ones_like(input_ids)
    output = lm._modules[decoder_name(lm)](input_ids=input_ids, use_cache=False, **inputs)
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


def output_head(model: torch.nn.Module) -> Head:
    """Return the function from hidden states to logits that is exactly the model's own.

    Families differ in what surrounds the last matrix: Gemma 2 caps the logits, Cohere multiplies and Granite
    divides them, and HyperCLOVA X multiplies by a number that Granite's config calls the same. None of it
    is repeated here: the model's own forward runs, with a decoder that hands over the given hidden states.
    """
    lm = causal_lm(model)
    # A second view of the same model: the same tensors, but the decoder is exchanged in this view only.
    view = object.__new__(type(lm))
    name = decoder_name(lm)
    view.__dict__ = {**lm.__dict__, "_modules": {**lm._modules, name: _GivenStates(lm._modules[name])}}

    def head(hidden: torch.Tensor) -> torch.Tensor:
        # The class's forward, because accelerate binds an instance's own to the model as it was.
        return type(lm).forward(view, inputs_embeds=hidden, return_dict=True).logits

    return head


def causal_lm(model: torch.nn.Module) -> Any:
    """Return the causal language model inside PEFT, torch.compile and distributed wrappers.

    Raises:
        RopeExtendError: if there is none, or if it reads a learned prompt that only its wrapper adds.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise RopeExtendError(
            f"{adapter.peft_type} puts learned vectors before the text, which shifts every position; use an "
            "adapter inside the layers, such as LoRA"
        )
    lm = unwrap(model)
    if decoder_name(lm) is None or lm.get_output_embeddings() is None:
        raise RopeExtendError(
            f"{type(lm).__name__} is not a causal language model of transformers: it has no decoder with a "
            "language-model head. AutoModelForCausalLM.from_pretrained(...) gives one"
        )
    return lm


def decoder_name(lm: torch.nn.Module) -> str | None:
    """Under which name a causal language model holds its decoder: ``model``, ``gpt_neox``, …"""
    # Not by `base_model_prefix`: Llama 4's text model names one there that it does not have.
    return next((name for name, child in lm.named_children() if isinstance(child, PreTrainedModel)), None)


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output of which only the hidden states are known; the rest (router logits, …) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenStates(torch.nn.Module):
    """Stands where the decoder stood and returns hidden states that were computed before."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["decoder_of_record"] = decoder  # not a submodule: it must not run, nor be trained

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["decoder_of_record"], name)
        if isinstance(value, torch.nn.Module):
            raise RopeExtendError(
                f"this family's forward reaches for {name!r} inside its decoder, so its head cannot run alone"
            )
        return value
