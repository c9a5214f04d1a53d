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
    matches = _named(text)
    if matches:
        return matches[0]
    if _key(text) == "a100":
        raise RopeExtendError("a GPU called 'A100' has 40 or 80 GB; write a100-40gb or a100-80gb")
    if one := _one_of_several(text):
        raise RopeExtendError(
            f"one GPU is planned for, got {text!r}; give {one!r}. docs/many_gpus.md says how to train on "
            "several"
        )
    near = _nearest(text)
    if near or not re.match(r"\s*\d", text):
        hint = f" Did you mean {near!r}?" if near else ""
        raise RopeExtendError(
            f"no GPU is known as {text!r}.{hint} Known: {', '.join(_MEMORY)}. Of another, give its memory, "
            "such as 24GB"
        )
    memory = memory_size(text)
    return Gpu(f"{memory / 1e9:g} GB" if memory >= 1e6 else f"{memory} bytes", memory)


def gpu_words() -> list[str]:
    """The names of the known GPUs as one writes them at a command line, such as `rtx-4090`."""
    return [_word(gpu) for gpu in GPUS]


def gpus_with(memory: int) -> list[Gpu]:
    """The known GPUs with exactly this memory, in bytes."""
    return [gpu for gpu in GPUS if gpu.memory == memory]


def _named(text: str) -> list[Gpu]:
    """The known GPUs with a name, which may leave out RTX."""
    return [gpu for gpu in GPUS if _key(text) in (_key(gpu.name), _key(gpu.name).removeprefix("rtx"))]


def _one_of_several(text: str) -> str:
    """The name or memory in a text such as `2xh100`; empty if there is no count of GPUs."""
    found = re.fullmatch(r"\s*\d+\s*[x×*]\s*(\S.*)|(.+?)\s*[x×*]\s*\d+\s*", text, re.IGNORECASE)
    one = (found[1] or found[2]).strip() if found else ""
    known = _named(one) or _key(one) == "a100" or re.fullmatch(r"[\d.]+\s*[gt]i?b", one, re.IGNORECASE)
    return one if known else ""


def _nearest(text: str) -> str:
    """The known GPU that a text seems to mean, as one writes it; empty if there is none.

    A module and a memory after the name are left out first, as in `h100-sxm-80gb`: only the A100 has two
    memories. Otherwise the first letter must agree: V100 and H100 are both right names.
    """
    wanted = _key(text)
    words = {_key(gpu.name): _word(gpu) for gpu in GPUS}
    words = {**{key.removeprefix("rtx"): word for key, word in words.items()}, **words}
    started = [key for key in words if re.fullmatch(rf"{key}(sxm\d?)?([1-9]\d*(gi?b?)?)?", wanted)]
    if started:
        return words[max(started, key=len)]
    if wanted[:1].isdigit():  # a memory
        return ""
    near = difflib.get_close_matches(wanted, [key for key in words if key[0] == wanted[:1]], n=1)
    return words[near[0]] if near else ""


def _word(gpu: Gpu) -> str:
    return gpu.name.lower().replace(" ", "-")


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
