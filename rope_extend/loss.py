"""Next-token loss that never holds the logits of the whole window; used in training and evaluation.

At 128k tokens and a vocabulary of 128k, the logits of one document are 64 GiB in float32, while its last
hidden states are 1 GiB. So the decoder runs once over the window, and the head runs over a few tokens at a
time. In training, the gradient of the hidden states is computed from each chunk of logits at once, in the
forward pass. So logits are neither kept for the backward pass nor computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rope_extend.errors import RopeExtendError
from rope_extend.models.decoders import unwrap
from rope_extend.models.planned_device import device_of

CHUNK_BYTES = 31 * 2**20
"""Default budget for the float32 logits of one chunk on a CPU, in bytes. Blocks of 32 MiB and more are mapped
page by page each time they are allocated, which takes a third of the time of the product with the head."""
GPU_CHUNK_BYTES = 256 * 2**20
"""The same on other devices: each chunk reads the whole head from memory, so few large ones are faster."""
GPU_ROWS = 128
"""Rows of a tile of a matrix product on a GPU: the rows of a chunk are a multiple of it."""

IGNORED = -100
"""Label of a token that is not scored, as in transformers."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Turns hidden states `[B, T, D]` into logits `[B, T, V]`, both in the model's dtype."""


def default_chunk_bytes(device: torch.device) -> int:
    """Default size in bytes of the float32 logits that are computed at a time."""
    return CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


def next_token_loss(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
    chunk_bytes: int | None = None,
    **inputs: Any,
) -> torch.Tensor:
    """Mean next-token loss in nats, a differentiable float32 scalar, equal to the model's own.

    If gradients are enabled, the gradients of the hidden states and of the trained parameters of the head are
    computed here, a chunk of tokens at a time; the backward pass only scales them. With a frozen head, each
    token takes two products with the matrix of the head, and the memory kept is that of the hidden states.

    Args:
        model: a causal language model of transformers, with or without PEFT.
        input_ids: int64 `[B, T]`.
        labels: int64 `[B, T]`, not shifted, -100 for tokens that are not scored; `input_ids` if not given.
        shift_labels: used instead of `labels`, int64 `[B, T]`: the target of each position. For a part of a
            text, whose last token predicts the first of the next part.
        num_items_in_batch: divisor of the sum of losses, as in transformers: the number of scored tokens in
            all accumulated forward passes, so that each token has the same weight; the number in this batch
            if not given.
        chunk_bytes: size of the float32 logits of one chunk, in bytes; the peak is about two and a half times
            as much. A chunk has at least one token.
        inputs: further inputs of the decoder, such as `position_ids` or `attention_mask`.

    Returns:
        The mean over all scored tokens; zero if there are none. The auxiliary router loss that a
        mixture-of-experts model adds with `output_router_logits=True` is not part of it.

    Raises:
        RopeExtendError: the model is not a causal language model, or it is wrapped in
            DistributedDataParallel while gradients are enabled (use `chunked_loss` instead). Also raised by
            `backward(create_graph=True)`: there are no second derivatives.
    """
    if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        raise RopeExtendError(
            "the model is wrapped in DistributedDataParallel, but the loss does not use its forward, so "
            "gradients would not be synchronised; call chunked_loss(model) before it is wrapped instead"
        )
    hidden = hidden_states(model, input_ids, **inputs)
    if shift_labels is None:
        shift_labels = shifted(input_ids if labels is None else labels)
    return mean_loss(model, hidden, shift_labels, num_items_in_batch, chunk_bytes)


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The label of the next token at each position, int64 `[B, T]`; the last has nothing to predict."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def mean_loss(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
    chunk_bytes: int | None = None,
) -> torch.Tensor:
    """`next_token_loss` of hidden states `[B, T, D]`; the targets, int64 `[B, T]`, are shifted already."""
    targets = targets.to(hidden.device)
    if num_items_in_batch is None:
        num_items_in_batch = (targets != IGNORED).sum().clamp(min=1)
    head = output_head(model)
    probe = head(hidden.detach()[:1, :1])  # one token, for the vocabulary size and the trained parameters
    trained = _leaves(probe)
    size = _tokens_per_chunk(probe.shape[-1], chunk_bytes, device_of(hidden))
    if hidden.requires_grad or trained:
        total = _SummedLoss.apply(hidden, targets, head, size, *trained)  # type: ignore[no-untyped-call]
    else:
        total = token_losses(hidden, head, targets, chunk_bytes=chunk_bytes).sum()
    return total / num_items_in_batch


@torch.no_grad()
def token_losses(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    chunk_bytes: int | None = None,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """Negative log-likelihood of each target in nats, float32 `[B, T]`; zero for targets of -100.

    The product with the head is computed in the model's dtype, as in the model itself, and the log-sum-exp in
    float32. For evaluation: the result has no gradient; that of `next_token_loss` has.

    Args:
        hidden: the decoder's last hidden states `[B, T, D]`.
        head: from `output_head`, or any function from hidden states to logits.
        targets: int64 `[B, T]`, already shifted: `targets[b, t]` is what `hidden[b, t]` predicts.
        chunk_bytes: size of the logits of one chunk in float32, in bytes; by default 256 MiB, and 31 MiB on
            a CPU. A chunk has at least one token.
        vocabulary: number of logits per token; if not given, the head runs on one token to find out.
    """
    rows = hidden.flatten(0, 1)  # [B·T, D]
    if vocabulary is None:
        vocabulary = head(rows[None, :1]).shape[-1]
    size = _tokens_per_chunk(vocabulary, chunk_bytes, device_of(rows))
    losses = []
    for piece, expected in zip(torch.split(rows, size), torch.split(targets.flatten(), size), strict=True):
        logits = head(piece[None])[0]
        # The head may be on another device than the layers; hooks move the states to it.
        expected = expected.to(logits.device)
        losses.append(F.cross_entropy(logits.float(), expected, reduction="none", ignore_index=IGNORED))
        del logits  # before the next chunk's are computed
    return torch.cat(losses).view(targets.shape)


def _tokens_per_chunk(vocabulary: int, chunk_bytes: int | None, device: torch.device) -> int:
    if chunk_bytes is None:
        chunk_bytes = default_chunk_bytes(device)
    tokens = max(1, chunk_bytes // (4 * vocabulary))
    return tokens if device.type == "cpu" or tokens < GPU_ROWS else tokens // GPU_ROWS * GPU_ROWS


class _SummedLoss(torch.autograd.Function):
    """Sum of the losses of all scored tokens, a float32 scalar; its gradients are computed with it.

    They are the gradients of the sum, not of the mean, so they keep their precision in float16 and bfloat16
    for any number of tokens. The backward pass multiplies them by the gradient of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, head: Head, size: int, *trained: torch.Tensor
    ) -> torch.Tensor:
        """Compute loss and gradients of the scored tokens, `size` at a time.

        `trained` has every leaf of the head's graph. Each is an input, so that autograd reaches it, and so
        does DistributedDataParallel, which waits for its gradient.
        """
        rows, expected = hidden.flatten(0, 1), targets.flatten()
        backward = ctx.needs_input_grad[0]  # of the hidden states, for the decoder
        of_rows = torch.zeros_like(rows) if backward else rows.new_empty(0)
        # Sums over many chunks, for which the 8 bits of bfloat16 are too few.
        of_trained = [
            torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in trained
        ]
        losses = [torch.zeros(1, device=rows.device)]
        for chunk in torch.split((expected != IGNORED).nonzero()[:, 0], size):
            piece = rows[chunk].requires_grad_(backward)
            inputs = (piece, *trained) if backward else trained
            results = _loss_and_gradients(head, piece, expected[chunk], inputs)
            losses.append(results.pop(0))
            if backward:
                of_rows[chunk] = results.pop(0)
            for total in of_trained:
                total += results.pop(0)  # freed before the next chunk's is computed
        ctx.save_for_backward(of_rows, *of_trained)
        ctx.shape, ctx.dtypes = hidden.shape, [leaf.dtype for leaf in trained]
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that the forward pass computed."""
        if torch.is_grad_enabled():
            raise RopeExtendError(
                "this loss has no second derivative: its gradient is computed in the forward pass. Call "
                "backward without create_graph, or take the loss from model(input_ids, labels=...)"
            )
        of_rows, *of_trained = ctx.saved_tensors
        scale = float(gradient)  # a number: a tensor would be rounded to the dtype of the gradients
        return (
            (of_rows * scale).view(ctx.shape) if ctx.needs_input_grad[0] else None,
            *(None,) * 3,
            *((total * scale).to(dtype) for total, dtype in zip(of_trained, ctx.dtypes, strict=True)),
        )


def _loss_and_gradients(
    head: Head, rows: torch.Tensor, targets: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Summed loss of a chunk `[n, D]`, float32 `[1]`, and its gradient with respect to each of `inputs`.

    A separate function, so that a chunk's logits are freed before those of the next are computed.
    """
    with torch.enable_grad():
        logits = head(rows[None]).flatten(0, 1)  # not [0]: its backward pass would copy
    classes = targets[:, None]
    logs = torch.log_softmax(logits.detach(), -1, dtype=torch.float32)
    loss = -logs.gather(1, classes).sum(0)
    slopes = logs.exp_()  # gradient with respect to the logits: softmax minus one-hot
    slopes.scatter_add_(1, classes, slopes.new_full(classes.shape, -1))
    # The edge, not the logits, so that they are freed before the gradients of the inputs are computed.
    edge, slopes = get_gradient_edge(logits), slopes.to(logits.dtype)
    del logits, logs
    return [loss, *torch.autograd.grad([edge], inputs, [slopes])]


def _leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """All leaves of a result's autograd graph: the trained parameters of the modules that computed it."""
    leaves: list[torch.Tensor] = []
    nodes, seen = [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [parent for parent, _ in node.next_functions]
    return leaves


def hidden_states(model: torch.nn.Module, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Last hidden states `[B, T, D]` of a causal language model, in its dtype: the input of its head.

    Adapters and patches stay active, and nothing is cached. No attention mask over all pairs is built if the
    model's attention needs none. Each row is one text, whatever its `position_ids`.
    """
    lm = causal_lm(model)
    if inputs.get("position_ids") is not None and inputs.get("attention_mask") is None:
        # Otherwise transformers takes every gap in the positions for the border between two packed texts, and
        # masks attention across it.
        inputs["attention_mask"] = torch.ones_like(input_ids)
    output = lm._modules[decoder_name(lm)](input_ids=input_ids, use_cache=False, **inputs)
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


def output_head(model: torch.nn.Module) -> Head:
    """Return the model's own function from hidden states to logits.

    Families differ in what they do around the last matrix. Gemma 2 caps the logits, Cohere multiplies them,
    Granite divides them, and HyperCLOVA X multiplies by a number that has the same name in Granite's config.
    None of this is repeated here: the model's own forward runs, with a decoder that returns the given hidden
    states.
    """
    lm = causal_lm(model)
    # A second view of the model with the same tensors, in which the decoder is replaced.
    view = object.__new__(type(lm))
    modules = dict(lm._modules)
    name = decoder_name(lm)
    modules[name] = _GivenStates(modules[name])
    view.__dict__ = {**lm.__dict__, "_modules": modules}

    def head(hidden: torch.Tensor) -> torch.Tensor:
        # The forward of the class: accelerate may have bound the instance's forward to the original model.
        return type(lm).forward(view, inputs_embeds=hidden, return_dict=True).logits

    return head


def causal_lm(model: torch.nn.Module) -> Any:
    """Return the causal language model inside PEFT, torch.compile and distributed wrappers.

    Raises:
        RopeExtendError: there is none, or its wrapper adds a learned prompt.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise RopeExtendError(
            f"{adapter.peft_type} adds learned vectors before the text, which shifts every position; use an "
            "adapter inside the layers, such as LoRA"
        )
    lm = unwrap(model)
    if decoder_name(lm) is None or lm.get_output_embeddings() is None:
        raise RopeExtendError(
            f"{type(lm).__name__} is not a causal language model of transformers: it has no decoder with a "
            "language-model head. Load the model with AutoModelForCausalLM.from_pretrained(...)"
        )
    return lm


def decoder_name(lm: torch.nn.Module) -> str | None:
    """The name of a causal language model's decoder: `model`, `gpt_neox`, …; None if it has none."""
    # Not `base_model_prefix`: in Llama 4's text model, that module does not exist.
    return next((name for name, child in lm.named_children() if isinstance(child, PreTrainedModel)), None)


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output with hidden states only; everything else (router logits, …) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenStates(torch.nn.Module):
    """Replaces the decoder and returns hidden states that were computed before."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["decoder_of_record"] = decoder  # not a submodule: it must neither run nor be trained

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["decoder_of_record"], name)
        if isinstance(value, torch.nn.Module):
            raise RopeExtendError(
                f"this family's forward uses {name!r} inside its decoder, so its head cannot run alone"
            )
        return value
