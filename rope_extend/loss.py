"""Next-token loss that never holds the logits of the whole window; training and evaluation both use it.

At 128k tokens and a vocabulary of 128k, the logits of one document are 64 GiB in float32, while its last
hidden states are 1 GiB. So the decoder runs once over the window, and the head runs over a few tokens at a
time. In training each piece of logits is turned into the gradient of the hidden states while it exists, in
the forward pass: it is neither kept for the backward pass nor computed again there.
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
from rope_extend.inspection import unwrap

_SOFTMAX_BYTES = 8 * 2**20
"""How many bytes are written at a time from logits to log-probabilities."""
CHUNK_BYTES = 64 * 2**20
"""Default budget for the float32 logits of one chunk, in bytes."""

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

    @property
    def config(self) -> Any:
        """The model's, by which accelerate refuses what sequence parallelism cannot do."""
        return causal_lm(self.model).config

    @property
    def _no_split_modules(self) -> Any:
        """Classes of the model's layers, each of which FSDP shards as a unit."""
        return causal_lm(self.model)._no_split_modules

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
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    **inputs: Any,
) -> torch.Tensor:
    """Mean next-token loss in nats, a differentiable float32 scalar, equal to the model's own.

    With gradients on, those of the hidden states and of whatever is trained in the head are computed here,
    a chunk of tokens at a time; the backward pass only scales them. For a frozen head that is two matrix
    products with the head for each token, and what is kept has the size of the hidden states.

    Args:
        model: a causal language model of transformers, with or without PEFT.
        input_ids: int64 ``[B, T]``.
        labels: int64 ``[B, T]``, not shifted, -100 where a token is not scored; ``input_ids`` if not given.
        shift_labels: instead of ``labels``, int64 ``[B, T]``: what each position predicts, for a part of a
            text, whose last token predicts one of the next part.
        num_items_in_batch: what to divide the sum of losses by, as in transformers: the scored tokens of all
            the forward passes that are accumulated, so that each token counts the same whichever pass it
            is in; the scored tokens of this batch if not given.
        chunk_bytes: how many bytes the float32 logits of one chunk may have; about two and a half times as
            many exist at one time. One token at least is in a chunk.
        inputs: further inputs of the decoder, such as ``position_ids`` or ``attention_mask``.

    Returns:
        The mean over all scored tokens; zero if there are none. The auxiliary router loss that a
        mixture-of-experts model adds with ``output_router_logits=True`` is not part of it.

    Raises:
        RopeExtendError: if the model is not a causal language model, or is wrapped in
            DistributedDataParallel while gradients are on: then wrap :class:`NextTokenLoss` instead. From
            ``backward(create_graph=True)``: there are no second derivatives.
    """
    if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        raise RopeExtendError(
            "the model is wrapped in DistributedDataParallel, whose gradients would not be synchronised, "
            "because the loss does not go through its forward; wrap NextTokenLoss(model) in it instead"
        )
    hidden = hidden_states(model, input_ids, **inputs)
    if shift_labels is None:
        # Position t predicts token t + 1; the last position has nothing to predict.
        shift_labels = F.pad((input_ids if labels is None else labels)[:, 1:], (0, 1), value=IGNORED)
    targets = shift_labels.to(hidden.device)
    if num_items_in_batch is None:
        num_items_in_batch = (targets != IGNORED).sum().clamp(min=1)
    head = output_head(model)
    one = head(hidden.detach()[:1, :1])  # of one token: says the size of the vocabulary, and what is trained
    trained = _leaves(one)
    size = _tokens_per_chunk(one.shape[-1], chunk_bytes)
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
    chunk_bytes: int = CHUNK_BYTES,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """Negative log-likelihood of each target in nats, float32 ``[B, T]``; zero where the target is -100.

    The product with the head is taken in the model's dtype, as the model does itself, and the log-sum-exp
    in float32. For evaluation: the result carries no gradient, :func:`next_token_loss` does.

    Args:
        hidden: the decoder's last hidden states ``[B, T, D]``.
        head: from :func:`output_head`, or any function from hidden states to logits.
        targets: int64 ``[B, T]``; ``targets[b, t]`` is what ``hidden[b, t]`` predicts, so already shifted.
        chunk_bytes: how many bytes the logits of one chunk would have in float32; one token at least.
        vocabulary: how many logits the head gives; if it is not said, the head is run on one token to see.
    """
    rows = hidden.flatten(0, 1)  # [B·T, D]
    if vocabulary is None:
        vocabulary = head(rows[None, :1]).shape[-1]
    size = _tokens_per_chunk(vocabulary, chunk_bytes)
    pieces = zip(torch.split(rows, size), torch.split(targets.to(rows.device).flatten(), size), strict=True)
    losses = []
    room = torch.empty(0)
    for piece, expected in pieces:
        logits = head(piece[None])[0]
        # A head may be on another device than the layers: then hooks have brought the states to it.
        expected = expected.to(logits.device)
        # The product with the head had better be large; what the softmax writes should fit a CPU's caches.
        written = _SOFTMAX_BYTES if logits.dtype == torch.float32 else _SOFTMAX_BYTES // 2  # and as float32
        some = min(_tokens_per_chunk(vocabulary, written), len(logits))
        if len(room) < some:
            room = logits.new_empty(some, logits.shape[-1], dtype=torch.float32)
        for part, wanted in zip(torch.split(logits, some), torch.split(expected, some), strict=True):
            logs = torch.log_softmax(part.float(), -1, out=room[: len(part)])
            losses.append(F.nll_loss(logs, wanted, reduction="none", ignore_index=IGNORED))
        del logits  # before the next ones are there
    return torch.cat(losses).view(targets.shape)


def _tokens_per_chunk(vocabulary: int, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // (4 * vocabulary))


class _SummedLoss(torch.autograd.Function):
    """Sum of the losses of all scored tokens, a float32 scalar, whose gradients are found along with it.

    They are those of the sum, and the backward pass multiplies them by the gradient of the sum, so they keep
    their precision in float16 and bfloat16 whatever the number of tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, head: Head, size: int, *trained: torch.Tensor
    ) -> torch.Tensor:
        """Go over the scored tokens, ``size`` at a time.

        Args:
            ctx: of autograd.
            hidden: ``[B, T, D]``.
            targets: int64 ``[B, T]``, already shifted, -100 where a token is not scored.
            head: from hidden states to logits.
            size: tokens per chunk.
            trained: every leaf of the head's graph; each is an input here so that autograd, and whoever
                waits for a gradient as DistributedDataParallel does, finds the way to it.
        """
        rows, expected = hidden.flatten(0, 1), targets.flatten()
        backward = ctx.needs_input_grad[0]  # past the head, into the decoder
        of_rows = torch.zeros_like(rows) if backward else rows.new_empty(0)
        # Summed over many chunks, so not in bfloat16's 8 bits.
        of_trained = [
            torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in trained
        ]
        losses = [torch.zeros(1, device=rows.device)]
        for chunk in torch.split((expected != IGNORED).nonzero()[:, 0], size):
            piece = rows[chunk].requires_grad_(backward)
            wanted = (piece, *trained) if backward else trained
            found = _loss_and_gradients(head, piece, expected[chunk], wanted)
            losses.append(found.pop(0))
            if backward:
                of_rows[chunk] = found.pop(0)
            for total in of_trained:
                total += found.pop(0)  # and gone, before the next chunk's is made
        ctx.save_for_backward(of_rows, *of_trained)
        ctx.shape, ctx.dtypes = hidden.shape, [leaf.dtype for leaf in trained]
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale what the forward pass found."""
        if torch.is_grad_enabled():
            raise RopeExtendError(
                "this loss has no second derivative: its gradient is computed in the forward pass. Call "
                "backward without create_graph, or take the loss from model(input_ids, labels=...)"
            )
        of_rows, *of_trained = ctx.saved_tensors
        scale = float(gradient)  # as a number: a tensor would be rounded to the dtype of what it multiplies
        return (
            (of_rows * scale).view(ctx.shape) if ctx.needs_input_grad[0] else None,
            *(None,) * 3,
            *((total * scale).to(dtype) for total, dtype in zip(of_trained, ctx.dtypes, strict=True)),
        )


def _loss_and_gradients(
    head: Head, rows: torch.Tensor, targets: torch.Tensor, wanted: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Summed loss of a chunk ``[n, D]``, float32 ``[1]``, and its gradient by each tensor that is wanted.

    A function of its own, so that a chunk's logits are gone before those of the next are made.
    """
    with torch.enable_grad():
        logits = head(rows[None]).flatten(0, 1)  # not [0]: its backward pass would copy
    classes = targets[:, None]
    logs = torch.log_softmax(logits.detach(), -1, dtype=torch.float32)
    loss = -logs.gather(1, classes).sum(0)
    slopes = logs.exp_()  # of the loss by the logits: softmax less one-hot
    slopes.scatter_add_(1, classes, slopes.new_full(classes.shape, -1))
    # By where their gradient goes in, so that the logits are gone while those of what is trained are made.
    edge, slopes = get_gradient_edge(logits), slopes.to(logits.dtype)
    del logits, logs
    return [loss, *torch.autograd.grad([edge], wanted, [slopes])]


def _leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """Every leaf that a result's gradient would reach: what is trained of the modules it came from."""
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

    While gradients are off, the logits of a call may be written over by those of the next.
    """
    lm = causal_lm(model)
    # A second view of the same model: the same tensors, but two modules are exchanged in this view only.
    view = object.__new__(type(lm))
    modules = dict(lm._modules)
    name = decoder_name(lm)
    modules[name] = _GivenStates(modules[name])
    for name, module in lm.named_children():
        if module is lm.get_output_embeddings() and _is_plain(module):
            modules[name] = _InOneRoom(module)
    view.__dict__ = {**lm.__dict__, "_modules": modules}

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


class _InOneRoom(torch.nn.Module):
    """Stands where the last matrix stood and, without gradients, writes every product to the same memory.

    A CPU's allocator gives back blocks of this size at once, and the system hands out new ones page by page,
    which takes a third of the time of the product itself.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.__dict__["linear"], self.room = linear, torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        linear: torch.nn.Linear = self.__dict__["linear"]
        device = hidden.device.type
        cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if torch.is_grad_enabled() or cast:
            return linear(hidden)
        rows = hidden.flatten(0, -2)
        size = rows.shape[0] * linear.out_features
        if self.room.numel() < size:
            self.room = torch.empty(0)  # gone, before the next is made
            self.room = rows.new_empty(size)
        found = self.room[:size].view(-1, linear.out_features)
        if linear.bias is None:
            torch.mm(rows, linear.weight.T, out=found)
        else:
            torch.addmm(linear.bias, rows, linear.weight.T, out=found)
        return found.view(*hidden.shape[:-1], -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["linear"], name)


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a module is a matrix and nothing else: no adapter, no quantisation, no hook, not spread."""
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and "forward" not in vars(module)  # as accelerate binds it, to fetch a weight from elsewhere
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
