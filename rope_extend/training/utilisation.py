"""What share of a device's peak a training run reaches: model FLOPs utilisation (2204.02311, appendix B).

PaLM counts, for each token, 6 operations for every weight that it is multiplied with: 2 in the forward pass,
2 for the gradient of the activations, 2 for that of the weight. A frozen weight has no gradient of its own,
and so 4. With N frozen weights, M trained ones, and per pair of a query and a key in a layer 4 h d operations
for h heads of d channels (2 for the logit, 2 for the sum of values), three times that with the backward pass:

    operations for a token = 4 N + 6 M + 3 · 4 h d · layers · (pairs / tokens)

PaLM counts every pair, here only those that the causal mask leaves, which halves the last term; in a layer
with a sliding window, only those inside it. What gradient checkpointing computes a second time does not
count, nor do norms, activations, rotations, dropout and the optimizer.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch import nn

from rope_extend.evaluation.plan import operations_of
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
"""Dense bfloat16 operations per second by what is in a device's name; the first that fits. From the makers'
data sheets, those with sparsity halved, and for the RTX cards with sums in float32."""

_OTHER = {"MIG", "D", "Laptop", "Max-Q", "Ti", "SUPER"}


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a device, by its driver's name for it; None if unknown.

    A part of a GPU (MIG) and a GPU's slower kin (RTX 4090 D, Laptop GPU) have a word more in the name, and
    are unknown.
    """
    if _OTHER & set(device_name.split()):
        return None
    words = f" {device_name} "
    return next((peak for name, peak in PEAKS if f" {name} " in words or f" {name}-" in words), None)


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of a device for weights of a dtype; None where it is not on record, as on a CPU."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_flops(torch.cuda.get_device_name(device))


def training_flops(model: nn.Module, length: int, *, quadratic: bool = True) -> float | None:
    """Operations that training takes for each token of a sequence, forward and backward.

    Those of the base model are counted on a twin without weights, so that experts that a token does not meet
    and towers that read no text do not count.

    Args:
        model: with its adapter, and with what is trained marked by `requires_grad`.
        length: tokens per sequence.
        quadratic: whether attention compares all pairs.

    Returns:
        The number of operations; None, with a word in the log, for a family that cannot be counted so.
    """
    lm = causal_lm(model)
    try:
        config = copy.deepcopy(lm.config)
        config._attn_implementation = "eager"  # every family has it, and the count is the same
        with torch.device("meta"):
            operations = operations_of(type(lm)(config))
    except Exception as error:  # whatever a family does with values, which the meta device does not have
        logger.info("%s: its operations cannot be counted (%r)", lm.config.model_type, error)
        return None
    adapter = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "lora_" in name and parameter.requires_grad and parameter.dim() == 2
    )
    head = lm.get_output_embeddings().weight
    own = head.numel() if head.requires_grad else 0
    attention = operations.attention(length) / length if quadratic else 0.0
    return 2 * operations.linear + 2 * own + 6 * adapter + 3 * attention
