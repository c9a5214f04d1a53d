"""Model FLOPs utilisation: the share of a device's peak that a run reaches (2204.02311, appendix B).

PaLM counts 6 operations per token and weight: 2 in the forward pass, 2 for the gradient of the activations,
and 2 for that of the weight. A frozen weight has no gradient, so it counts 4. A pair of a query and a key
takes 4 h d operations per layer for h heads of d channels (2 for the logit, 2 for the sum of values), three
times that with the backward pass. With N frozen and M trained weights:

    operations for a token = 4 N + 6 M + 3 · 4 h d · layers · (pairs / tokens)

PaLM counts every pair. Here only pairs within the causal mask count, which halves the last term; in a layer
with a sliding window, only those inside it. In packed blocks only pairs within a document count, and in
shifted sparse attention those within a group. Not counted: recomputation by gradient checkpointing, norms,
activations, rotations, dropout and the optimizer.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rope_extend.evaluation.flops import Operations, operations_of
from rope_extend.loss import causal_lm
from rope_extend.memory.gpus import peak_flops

logger = logging.getLogger(__name__)


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of a device for weights of a dtype; None if it is unknown, as on a CPU."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_flops(torch.cuda.get_device_name(device))


Spans = Mapping[int, float]
"""How many spans of consecutive tokens attend within themselves, by their length in tokens."""


@dataclass(frozen=True)
class TrainingOperations:
    """Operations of training, forward and backward.

    Attributes:
        linear: operations per token, without attention.
        forward: those of the forward pass, which know the cost of attention; None if attention does not
            compare pairs of a query and a key.
    """

    linear: float
    forward: Operations | None

    def per_token(self, spans: Spans) -> float:
        """Operations per token of sequences that consist of these spans."""
        tokens = sum(length * count for length, count in spans.items())
        if self.forward is None:
            return self.linear
        attention = sum(count * self.forward.attention(length) for length, count in spans.items())
        return self.linear + 3 * attention / tokens


def document_spans(sequences: Iterable[Mapping[str, Tensor]]) -> Spans:
    """The spans of packed blocks, which have `document_positions`: their documents."""
    lengths: Counter[int] = Counter()
    for sequence in sequences:
        positions = sequence["document_positions"]
        starts = torch.cat([(positions == 0).nonzero().flatten(), torch.tensor([len(positions)])])
        lengths.update(starts.diff().tolist())
    return lengths


def group_spans(tokens: int, group: int) -> Spans:
    """The spans of shifted sparse attention; of two halves of the heads, each counts one half.

    The heads that are shifted by half a group have one group less, and half a group at each end.
    """
    return {group: tokens / group - 0.5, group // 2: 1.0}


def training_operations(model: nn.Module, *, quadratic: bool = True) -> TrainingOperations | None:
    """The operations of training a model.

    Those of the base model are counted on a copy without weights. So experts that a token does not use do not
    count, nor do encoders of images or sound.

    Args:
        model: the model with its adapter; trained parameters have `requires_grad`.
        quadratic: whether attention compares all pairs.

    Returns:
        The operations; None, with a log line, for a family that does not run on the meta device.
    """
    lm = causal_lm(model)
    try:
        config = copy.deepcopy(lm.config)
        config._attn_implementation = "eager"  # every family supports it, and the count is equal
        with torch.device("meta"):
            forward = operations_of(type(lm)(config))
    except Exception as error:  # any error: a family may need values, which the meta device does not have
        logger.info("cannot count the operations of %s (%r)", lm.config.model_type, error)
        return None
    adapter = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "lora_" in name and parameter.requires_grad and parameter.dim() == 2
    )
    head = lm.get_output_embeddings().weight
    trained_head = head.numel() if head.requires_grad else 0
    linear = 2 * forward.linear + 2 * trained_head + 6 * adapter
    return TrainingOperations(linear, forward if quadratic else None)
