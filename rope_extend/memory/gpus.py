"""GPUs by name or by memory, and how fast they compute. The module imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rope_extend.errors import RopeExtendError
from rope_extend.units import memory_size

UTILISATION = (0.30, 0.45)
"""Shares of a GPU's peak that training reaches: hours are estimated for the lower and for the higher one.

PaLM's authors collected 21 to 46 % (2204.02311, table 3), and Llama 3 reached 38 to 43 % (2407.21783,
table 4). Those runs had many devices. We have not measured ours.
"""

LEAST_STEP = 0.1
"""Seconds that a training step takes at least, on any GPU.

A step starts some ten thousand kernels (8 forward and backward passes, and AdamW), each in about ten
microseconds. For small models that is more than the operations take. An assumption, not measured.
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU to plan for, or several equal ones.

    Attributes:
        name: its name as the driver reports it, or its memory if only that is known.
        memory: bytes, in decimal GB as on the data sheet, which leaves some for the driver.
        peak: dense bfloat16 operations per second, from the data sheet; None if only the memory is known.
        count: number of such GPUs; memory and peak are those of one.
    """

    name: str
    memory: int
    peak: float | None = None
    count: int = 1

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.count} x {self.name}"


_TERA = 1e12
GPUS = tuple(
    Gpu(name, gigabytes * 10**9, peak * _TERA)
    for name, gigabytes, peak in (
        ("L4", 24, 121), ("A10", 24, 125), ("A10G", 24, 70), ("A30", 24, 165), ("RTX 3090", 24, 71),
        ("RTX 4090", 24, 165.2), ("RTX 5090", 32, 209.5), ("A40", 48, 149.7), ("RTX A6000", 48, 154.8),
        ("RTX 6000 Ada", 48, 364.2), ("L40", 48, 181), ("L40S", 48, 362), ("A100 40GB", 40, 312),
        ("A100 80GB", 80, 312), ("A800", 80, 312), ("H100", 80, 989.4), ("H100 PCIe", 80, 756),
        ("H100 NVL", 94, 835.5), ("H800", 80, 989.4), ("H800 PCIe", 80, 756), ("GH200", 96, 989.4),
        ("H200", 141, 989.4), ("H200 NVL", 141, 835.5), ("B200", 180, 2250), ("MI300X", 192, 1307.4),
    )
)  # fmt: skip
"""Name, memory in GB, and dense bfloat16 peak in units of 10^12 operations per second, from the data sheets.

Figures with sparsity are halved, and those of RTX cards are with sums in float32.
"""


def find_gpu(text: str) -> Gpu:
    """The GPU of a name, such as `h100` or `RTX 4090`, or one with a given memory, such as `24GB`.

    `8xh100` is eight of them, and `2x8xh100` twice as many.

    Raises:
        RopeExtendError: neither a known name nor a size.
    """
    if several := re.fullmatch(r"([1-9]\d*) *x *(.+)", text, re.IGNORECASE):
        gpu = find_gpu(several[2])
        return replace(gpu, count=int(several[1]) * gpu.count)
    wanted = _key(text)
    by_key = {key: gpu for gpu in GPUS for key in (_key(gpu.name).removeprefix("rtx"), _key(gpu.name))}
    if wanted in by_key:
        return by_key[wanted]
    if re.match(r"\d[\d.]*[kmgt]?i?b?$", wanted):
        memory = memory_size(text)
        return Gpu(f"{memory / 1e9:g} GB" if memory >= 1e6 else f"{memory} bytes", memory)
    names = ", ".join(gpu.name.lower().replace(" ", "-") for gpu in GPUS)  # as one writes them in a command
    raise RopeExtendError(
        f"no GPU is known as {text!r}. Give the name of a GPU ({names}), or of another its memory, such as "
        "24GB; of several, such as 8xh100, also their number"
    )


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
