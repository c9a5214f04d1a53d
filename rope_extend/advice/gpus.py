"""GPUs by name or by memory, and how fast they compute. The module imports nothing heavy."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from rope_extend.errors import RopeExtendError
from rope_extend.units import memory_size

UTILISATION = (0.30, 0.45)
"""Shares of a GPU's peak that training reaches: hours are estimated for the lower and for the higher one.

PaLM's authors collected 21 to 46 % (2204.02311, table 3), and Llama 3 reached 38 to 43 % (2407.21783,
table 4). Those runs had many devices. We have not measured ours.
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU to plan for.

    Attributes:
        name: its name as the driver reports it, or its memory if only that is known.
        memory: bytes, in decimal GB as on the data sheet, which leaves some for the driver.
    """

    name: str
    memory: int

    @property
    def peak(self) -> float | None:
        """Dense bfloat16 operations per second, from the data sheet; None if only the memory is known."""
        from rope_extend.training.utilisation import peak_flops  # imports torch

        return peak_flops(self.name)


_MEMORY = {
    "L4": 24, "A10": 24, "A10G": 24, "A30": 24, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32, "A40": 48,
    "RTX A6000": 48, "RTX 6000 Ada": 48, "L40": 48, "L40S": 48, "A100 40GB": 40, "A100 80GB": 80, "A800": 80,
    "H100": 80, "H100 PCIe": 80, "H100 NVL": 94, "H800": 80, "GH200": 96, "H200": 141, "H200 NVL": 141,
    "B200": 180, "MI300X": 192,
}  # fmt: skip
"""Memory in GB, from the data sheets. The names are those of `PEAKS` in `training/utilisation.py`."""
GPUS = tuple(Gpu(name, gigabytes * 10**9) for name, gigabytes in _MEMORY.items())


def find_gpu(text: str) -> Gpu:
    """The GPU of a name, such as `h100` or `RTX 4090`, or one with a given memory, such as `24GB`.

    Raises:
        RopeExtendError: neither a known name nor a size.
    """
    wanted = _key(text)
    matches = [gpu for gpu in GPUS if wanted in (_key(gpu.name), _key(gpu.name).removeprefix("rtx"))]
    if not matches and wanted == "a100":
        raise RopeExtendError("a GPU called 'A100' has 40 or 80 GB; write a100-40gb or a100-80gb")
    if matches:
        return matches[0]
    if not re.match(r"\s*\d", text):
        near = difflib.get_close_matches(wanted, map(_key, _MEMORY), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RopeExtendError(
            f"no GPU is known as {text!r}.{hint} Known: {', '.join(_MEMORY)}. Of another, give its memory, "
            "such as 24GB"
        )
    memory = memory_size(text)
    return Gpu(f"{memory / 1e9:g} GB", memory)


def gpu_words() -> list[str]:
    """The names of the known GPUs without spaces, as one writes them at a command line, such as `rtx-4090`."""
    return [gpu.name.lower().replace(" ", "-") for gpu in GPUS]


def gpus_with(memory: int) -> list[Gpu]:
    """The known GPUs with exactly this memory, in bytes."""
    return [gpu for gpu in GPUS if gpu.memory == memory]


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
