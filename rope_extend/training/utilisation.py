"""Model FLOPs utilisation: the share of a device's peak that a run reaches (2204.02311, appendix B).

PaLM counts 6 operations per token and weight: 2 in the forward pass, 2 for the gradient of the activations,
    and
2 for that of the weight. A frozen weight has no gradient, so it counts 4. A pair of a query and a key takes 4
h d operations per layer for h heads of d channels (2 for the logit, 2 for the sum of values), three times
that with the backward pass. With N frozen and M trained weights:

    operations for a token = 4 N + 6 M + 3 · 4 h d · layers · (pairs / tokens)

PaLM counts every pair. Here only pairs within the causal mask count, which halves the last term; in a layer
with a sliding window, only those inside it. Not counted: recomputation by gradient checkpointing, norms,
activations, rotations, dropout and the optimizer.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch import nn

from rope_extend.evaluation.flops import operations_of
from rope_extend.loss import causal_lm

logger = logging.getLogger(__name__)

PEAKS = (
    ("B200", 2.25e15),
    ("GH200", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835.5e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("RTX A6000", 154.8e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364.2e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
)
"""Dense bfloat16 operations per second, by a part of the device's name; the first match counts.

From the data sheets: figures with sparsity are halved, and those of RTX cards are with sums in float32.
"""

_VARIANTS = {"MIG", "D", "Laptop", "Max-Q", "Ti", "SUPER"}


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a device, by the name that its driver reports; None if unknown.

    Parts of a GPU (MIG) and slower variants (RTX 4090 D, Laptop GPU) have one more word in the name, and are
    unknown.
    """
    if _VARIANTS & set(device_name.split()):
        return None
    words = f" {device_name} "
    return next((peak for name, peak in PEAKS if f" {name} " in words or f" {name}-" in words), None)


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of a device for weights of a dtype; None if it is unknown, as on a CPU."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_flops(torch.cuda.get_device_name(device))


def training_flops(model: nn.Module, length: int, *, quadratic: bool = True) -> float | None:
    """Operations of training per token of a sequence, forward and backward.

    Those of the base model are counted on a copy without weights. So experts that a token does not use do not
    count, nor do encoders of images or sound.

    Args:
        model: the model with its adapter; trained parameters have `requires_grad`.
        length: tokens per sequence.
        quadratic: whether attention compares all pairs.

    Returns:
        The number of operations; None, with a log line, for a family that does not run on the meta device.
    """
    lm = causal_lm(model)
    try:
        config = copy.deepcopy(lm.config)
        config._attn_implementation = "eager"  # every family supports it, and the count is equal
        with torch.device("meta"):
            operations = operations_of(type(lm)(config))
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
    attention = operations.attention(length) / length if quadratic else 0.0
    return 2 * operations.linear + 2 * trained_head + 6 * adapter + 3 * attention
