"""Gradient steps on the divisors of the upper pairs and on the attention factor, with frozen weights.

The loss is smooth only in pairs with few turns within the target. So the pairs from the one with ten periods
in the trained window on are moved, and faster pairs stay as in the closed form that the steps start from.
The logarithm of a divisor is a sum of softplus terms, which keeps the divisors in order.

No paper has measured whether this works for a longer window without training; docs/search.md has ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from rope_extend.encodings.core.critical import critical_range
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_mode import evaluation_mode
from rope_extend.loss import next_token_loss
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.memory.meta_device import quiet_patching
from rope_extend.models.families import adapter_for
from rope_extend.models.rotary import ExtendedRotaryEmbedding, expand_cos_sin, has_float64
from rope_extend.models.view import decoder_layers, unwrap
from rope_extend.patching import patch_model
from rope_extend.searching.closed_forms import closed_forms, seeds
from rope_extend.searching.fitness import NEEDLE
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.search_log import Cost
from rope_extend.searching.space import Space, Table
from rope_extend.searching.strategies import FINALISTS, Context, Strategy

HEAD_ROOM = 2.0
"""The largest divisor, divided by the factor."""
RATE = 0.08
"""Learning rate of Adam at the first step; it falls to zero on a line."""
LEAST_RISE = 1e-2
"""The smallest difference of two logarithms of divisors at the start: a smaller one has no gradient."""
EVERY = 5
"""Steps between two candidates that are measured on all documents."""
CLOSED_FORMS = 12
"""The largest number of closed forms that are compared first."""
PASSES_OF_A_STEP = 3
"""A backward pass counts as two forward passes."""


class Movable(Protocol):
    """A table as numbers that gradient steps move."""

    numbers: Tensor
    """A leaf, float64, from which the divisors are computed."""
    attention: Tensor
    """The logarithm of the attention factor, a leaf."""

    def divisors(self) -> Tensor:
        """The divisor of each pair, float64 `[dim/2]`."""


class Point:
    """The numbers that are moved: one for each upper pair, and the logarithm of the attention factor.

    Args:
        start: the table that the steps start from.
        first: the first pair that is moved.
    """

    def __init__(self, start: Table, first: int) -> None:
        logs = torch.tensor(start.divisors, dtype=torch.float64).log()
        self.lower = logs[:first]
        rises = logs[first:].diff(prepend=logs[first - 1 : first]).clamp(min=LEAST_RISE)
        self.numbers = rises.expm1().log().requires_grad_()  # inverse of softplus
        self.attention = torch.tensor(start.attention_factor, dtype=torch.float64).log().requires_grad_()

    def divisors(self) -> Tensor:
        """The divisor of each pair, float64 `[dim/2]`, non-decreasing."""
        upper = self.lower[-1] + softplus(self.numbers).cumsum(0)
        return torch.cat((self.lower, upper)).exp()

    def table(self, space: Space) -> Table:
        """The nearest candidate."""
        with torch.no_grad():
            return space.table(self.divisors().tolist(), float(self.attention.exp()))


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
                f"gradient steps need float64, which {x.device} does not have; use race with gradient_steps "
                "false"
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
            "out of memory in a gradient step, which needs a backward pass over a whole document; use the "
            "strategy race with gradient_steps=False. With resume=True, a race keeps what it has measured"
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


def gradient_of_document(context: Context, point: Movable, start: Table, number: int) -> list[float]:
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


def run(context: Context) -> list[Table]:
    """Search, and return the best candidates.

    Raises:
        RopeExtendError: the model rotates a single pair, or the device has no float64.
    """
    config, space = context.config, context.space
    if space.pairs < 2:
        raise RopeExtendError("gradient needs 2 or more rotated channel pairs; use linear")
    if space.long is not None:
        closed = seeds(space, space.long.attention_factor)
    else:
        closed = closed_forms(config, space)
    start = context.ranked(context.ranked(closed, 1)[:FINALISTS])[0]
    point = Point(start, critical_range(space.shape)[0])
    optimizer = torch.optim.Adam([point.numbers, point.attention], lr=RATE)
    found = [start, point.table(space)]
    for step in range(config.iterations):
        take_step(context, point, start, optimizer, step, config.iterations)
        if step % EVERY == EVERY - 1 or step == config.iterations - 1:
            found.append(point.table(space))
            context.scores(found[-1:])
    return context.ranked(found)[:FINALISTS]


def take_step(
    context: Context, point: Movable, start: Table, optimizer: torch.optim.Optimizer, step: int, steps: int
) -> None:
    """Move a point by the gradient of one document, with a rate that falls to zero on a line.

    A gradient that is not finite moves nothing. A fixed attention factor does not move.

    Args:
        context: the search.
        point: what is moved.
        start: the table that the point began with.
        optimizer: of the point's numbers; the rate of each group begins with its `initial_lr`, or else RATE.
        step: the number of the step, from 0; the documents are used in turn.
        steps: the number of all steps.

    Raises:
        RopeExtendError: as `gradient_of_document`.
    """
    config, space = context.config, context.space
    values = gradient_of_document(context, point, start, step % config.documents)
    if not all(map(math.isfinite, values)):
        return
    point.numbers.grad = torch.tensor(values[:-1], dtype=torch.float64)
    fixed = config.attention_factor is not None or space.long is not None
    point.attention.grad = None if fixed else torch.tensor(values[-1], dtype=torch.float64)
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", RATE) * (1 - step / steps)
    optimizer.step()


def passes(config: SearchConfig) -> int:
    """The closed forms, the steps with their backward passes, and the candidates between them."""
    candidates = 2 + config.iterations // EVERY + 1
    steps = PASSES_OF_A_STEP * config.iterations * len(config.weights())
    return CLOSED_FORMS + (FINALISTS + candidates) * config.documents + steps


STRATEGY = Strategy(HEAD_ROOM, passes, run)
