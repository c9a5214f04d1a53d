"""Gradient steps on the logarithms of all divisors and of the attention factor, with frozen weights.

The divisors are put in order again after each step. The loss is smooth only in pairs with few turns within
the target, so faster pairs move less.

No paper has measured whether this works for a longer window without training; docs/search.md has ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_mode import evaluation_mode
from rope_extend.loss import next_token_loss
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.memory.meta_device import quiet_patching
from rope_extend.models.families import adapter_for
from rope_extend.models.rotary import ExtendedRotaryEmbedding, expand_cos_sin, has_float64
from rope_extend.models.view import decoder_layers, unwrap
from rope_extend.patching import patch_model
from rope_extend.searching.fitness import NEEDLE
from rope_extend.searching.search_log import Cost
from rope_extend.searching.space import Space, Table
from rope_extend.searching.strategies import Context

RATE, ATTENTION_RATE = 0.1, 0.015
"""Adam's rates at the first step, of the logarithms of divisors and of the attention factor."""
BETAS = (0.8, 0.95)
"""Adam's decay rates: there are few steps, so both averages are short."""
SMOOTH_PERIODS = 1
"""Pairs with more periods within the trained window move less, so that no phase changes by more than others.

The loss is not smooth in the divisors of fast pairs.
"""
AVERAGED = 1 / 3
"""The share of the last steps whose mean is a candidate too."""
PASSES_OF_A_STEP = 3
"""A backward pass counts as two forward passes."""


class OrderedPoint:
    """The numbers that are moved: the logarithm of each divisor but the first, and of the attention factor.

    Args:
        start: the table that the steps start from.
        space: where the search looks.
    """

    def __init__(self, start: Table, space: Space) -> None:
        logs = torch.tensor(start.divisors, dtype=torch.float64).log()
        self.lower = logs[:1]
        self.numbers = logs[1:].clone().requires_grad_()
        self.attention = torch.tensor(start.attention_factor, dtype=torch.float64).log().requires_grad_()
        self.largest = math.log(space.head_room * space.factor)
        periods = space.shape.trained_length * space.shape.inv_freq()[1:] / (2 * math.pi)
        self.share = (SMOOTH_PERIODS / periods).clamp(max=1)

    def divisors(self) -> Tensor:
        """The divisor of each pair, float64 `[dim/2]`."""
        return torch.cat((self.lower, self.numbers)).exp()

    def table(self, space: Space) -> Table:
        """The nearest candidate."""
        with torch.no_grad():
            return space.table(self.divisors().tolist(), float(self.attention.exp()))

    @torch.no_grad()
    def settle(self, before: Tensor) -> None:
        """After a step: shorten the moves of fast pairs, and put the divisors in order and into their range.

        The ordered values are the mean of the least that is above all earlier ones and the largest that is
        below all later ones.
        """
        moved = before + (self.numbers - before) * self.share
        rising = moved.cummax(0).values
        falling = moved.flip(0).cummin(0).values.flip(0)
        self.numbers.copy_(((rising + falling) / 2).clamp(float(self.lower[0]), self.largest))


@contextmanager
def differentiable_rotation(model: nn.Module, inv_freq: Tensor, attention_factor: Tensor) -> Iterator[None]:
    """Let cos and sin of a patched model have gradients with respect to a table.

    Args:
        model: a model that is patched by a static table.
        inv_freq: float64 `[dim/2]`, radians per token.
        attention_factor: the factor on cos and sin.

    Raises:
        RopeExtendError: the device has no float64.
    """
    base = unwrap(model)
    modules: list[Any] = list(adapter_for(base.config.model_type).rotary_modules(base.base_model).values())

    def forward(
        module: ExtendedRotaryEmbedding, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> Any:
        if layer_type != module.layer_type:
            assert module.original is not None
            return module.original(x, position_ids, layer_type)
        if not has_float64(x.device):
            raise RopeExtendError(
                f"gradient steps need float64, which {x.device} does not have; use gradient_steps=False"
            )
        positions = position_ids[0] if position_ids.dim() == 3 else position_ids  # text has equal parts
        angles = module.pad_unrotated(positions[..., None].to(torch.float64) * inv_freq.to(x.device))
        factor, dtype = attention_factor.to(x.device), module.dtype or x.dtype
        return expand_cos_sin(
            (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype), module.layout
        )

    try:
        for module in modules:
            module.forward = partial(forward, module)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No weight has a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _one_memory_error() -> Iterator[None]:
    """Say what to do if there is not enough memory for a backward pass.

    Raises:
        RopeExtendError: there is not.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RopeExtendError(
            "out of memory in a gradient step, which needs a backward pass over a whole document; use "
            "gradient_steps=False. With resume=True, the search keeps what it has measured"
        ) from error


@contextmanager
def _recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Each decoder layer keeps its inputs only, and runs again in the backward pass.

    transformers does this in training mode only, in which dropout would act. Does nothing for a family whose
    layers are not in one list.
    """
    found = decoder_layers(model)
    layers: list[Any] = [] if found is None else list(found.layers)
    before = [vars(layer).get("forward") for layer in layers]  # accelerate binds one, to fetch weights
    try:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


@contextmanager
def differentiable(
    model: nn.Module, space: Space, start: Table, inv_freq: Tensor, attention_factor: Tensor
) -> Iterator[torch.device]:
    """Let the loss of a model have gradients with respect to a table, and not to its weights.

    Args:
        model: the model.
        space: where the search looks.
        start: a table, which the model is patched with.
        inv_freq: as in `differentiable_rotation`, and so is `attention_factor`.

    Yields:
        The device of the inputs.
    """
    window = space.pretrained.trained_length
    with (
        quiet_patching(),
        patch_model(model, space.encoding(start), trained_length=window, target_length=space.target_length),
        evaluation_mode(model) as device,
        _frozen(model),
        _recomputed_layers(model),
        torch.enable_grad(),
        differentiable_rotation(model, inv_freq, attention_factor),
    ):
        yield device


def gradient_of_document(context: Context, point: OrderedPoint, start: Table, number: int) -> list[float]:
    """The gradient of a document's fitness: for each number of the point, and last for the attention factor.

    It is read from the log, if an earlier run has computed it.

    Raises:
        RopeExtendError: the gradient in the log does not belong to this search, or there is not enough memory
            for a backward pass.
    """
    evaluator, space = context.evaluator, context.space
    leaves = (point.numbers, point.attention)
    key = json.dumps([*point.numbers.tolist(), point.attention.item(), number])
    evaluator.count(PASSES_OF_A_STEP * len(evaluator.weights))
    if key in evaluator.log.gradients:
        logged = evaluator.log.gradients[key]
        if len(logged) != len(point.numbers) + 1:
            raise RopeExtendError(
                f"a gradient in {str(evaluator.log.file)!r} has {len(logged)} values, and this search needs "
                f"{len(point.numbers) + 1}; delete its line"
            )
        return logged
    began, model, fitness = perf_counter(), evaluator.model, evaluator.fitness
    present = 1.0 if space.current is None else space.current.attention_factor
    table = space.shape.inv_freq() / point.divisors()
    factor = present * point.attention.exp()
    with _one_memory_error(), differentiable(model, space, start, table, factor) as device:
        total, tokens = [torch.zeros_like(leaf) for leaf in leaves], 0
        for part, weight in evaluator.weights.items():
            if part == NEEDLE:
                window = fitness.needles[number]
                ids, scored = window.input_ids, window.answer
            else:
                ids = fitness.documents[number].input_ids[: int(part)]
                scored = len(ids) - 1
            labels = ids.clone()
            labels[: len(ids) - scored] = -100
            loss = weight * next_token_loss(model, ids[None].to(device), labels[None].to(device))
            # The divisors are computed once for all parts, so their graph is kept.
            parts = torch.autograd.grad(loss, leaves, retain_graph=True)
            total = [old + new.to(old.device) for old, new in zip(total, parts, strict=True)]
            tokens += len(ids)
    values = [*total[0].tolist(), total[1].item()]
    passes = PASSES_OF_A_STEP * len(evaluator.weights)
    cost = Cost(1, passes, PASSES_OF_A_STEP * tokens, perf_counter() - began)
    evaluator.log.add_gradient(key, values, cost)
    return values


def descend(context: Context, start: Table, passes: int) -> list[Table]:
    """The best tables of gradient steps from a table, the best first; measured on all documents.

    The rates fall to zero on a line. The documents are used in turn. A gradient that is not finite moves
    nothing, and a fixed attention factor does not move.

    Args:
        context: the search.
        start: the table to start from, which is measured already.
        passes: documents that may be measured; a step counts as three for each part of the fitness.

    Raises:
        RopeExtendError: as `gradient_of_document`.
    """
    config, space = context.config, context.space
    steps = (passes - 2 * config.documents) // (PASSES_OF_A_STEP * len(config.weights()))
    if steps < 1 or space.pairs < 2:
        return [start]
    point = OrderedPoint(start, space)
    optimizer = torch.optim.Adam(
        [{"params": [point.numbers], "lr": RATE}, {"params": [point.attention], "lr": ATTENTION_RATE}],
        betas=BETAS,
    )
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    fixed = config.attention_factor is not None or space.long is not None
    last: list[tuple[Tensor, float]] = []
    for step in range(steps):
        before = point.numbers.detach().clone()
        values = gradient_of_document(context, point, start, step % config.documents)
        if all(map(math.isfinite, values)):
            point.numbers.grad = torch.tensor(values[:-1], dtype=torch.float64)
            point.attention.grad = None if fixed else torch.tensor(values[-1], dtype=torch.float64)
            optimizer.step()
        falling.step()
        point.settle(before)
        if step >= steps - max(1, round(AVERAGED * steps)):
            last.append((point.divisors().detach().log(), float(point.attention.detach())))
    mean = torch.stack([logs for logs, _ in last]).mean(0).exp()
    factor = math.exp(math.fsum(value for _, value in last) / len(last))
    return context.ranked([start, point.table(space), space.table(mean.tolist(), factor)])
