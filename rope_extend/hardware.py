"""How a model is loaded: on which device or devices, in which numbers, with which attention kernels.

One set of options for every command that loads a model. What cannot work is refused before any weights are
read.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any, Self

import torch
from accelerate.utils import get_max_memory
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from rope_extend.errors import RopeExtendError
from rope_extend.families import adapter_for
from rope_extend.pretrained import default_dtype, pretrained
from rope_extend.processes import process_count

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager")
QUANTIZED = ("4bit", "8bit")
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Hardware:
    """How a model is loaded. Everything has a default that follows from the machine.

    Attributes:
        device: such as `cuda:1`; by default the GPU, if there is one. In a process of `torchrun`, the GPU of
            that number.
        device_map: spread the model over several GPUs, and what does not fit over the host's memory and
            disk: `auto`, another of accelerate's strategies, or a device for each module by name.
        dtype: of the weights; by default bfloat16 on a GPU that has it, else float32; of a checkpoint that is
            quantised already, its own.
        attention: the kernels, by transformers' name; by default sdpa.
        quantize: `4bit` (NF4) or `8bit`, by bitsandbytes, while the weights are read.
        limit_memory: how many bytes may be used on a device. On a GPU the allocator keeps to it.

    Raises:
        RopeExtendError: two of them contradict each other, or this machine does not have what they ask for.
    """

    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    dtype: torch.dtype | None = None
    attention: str | None = None
    quantize: str | None = None
    limit_memory: int | None = None

    def __post_init__(self) -> None:
        if self.device is not None and self.device_map is not None:
            raise RopeExtendError("give a device for the whole model, or a device_map to spread it; not both")
        if isinstance(self.device_map, str) and self.device_map not in MAPS:
            raise RopeExtendError(f"device_map must be one of {', '.join(MAPS)}, got {self.device_map!r}")
        if self.device_map is not None and process_count() > 1:
            raise RopeExtendError(
                "a model that is spread over all GPUs runs in one process; start one, or leave device_map "
                "out, so that each process has a model of its own"
            )
        for name, value, known in (
            ("attention", self.attention, ATTENTION),
            ("quantize", self.quantize, QUANTIZED),
        ):
            if value is not None and value not in known:
                raise RopeExtendError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.limit_memory is not None and self.limit_memory < 1:
            raise RopeExtendError(f"limit_memory is a number of bytes, got {self.limit_memory}")
        if self.quantize is not None and importlib.util.find_spec("bitsandbytes") is None:
            raise RopeExtendError(
                f"quantize={self.quantize!r} needs bitsandbytes: pip install 'rope_extend[quantize]'"
            )
        place = self.place  # refuses what is not there
        if self.attention is None or self.attention in ("sdpa", "eager"):
            return
        if place.type != "cuda":
            raise RopeExtendError(
                f"{self.attention} needs a GPU, and this is {place.type}; sdpa runs anywhere"
            )
        if self.attention.startswith("flash") and (self.dtype or default_dtype(place)) == torch.float32:
            raise RopeExtendError(f"{self.attention} takes bfloat16 or float16; give one of them as dtype")

    @property
    def place(self) -> torch.device:
        """Where the model is, or where its first layers are.

        Raises:
            RopeExtendError: there is no such device here.
        """
        gpus = torch.cuda.device_count()
        if self.device is None:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            return torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
        try:
            place = torch.device(self.device)
        except RuntimeError as error:
            raise RopeExtendError(
                f"no device is called {self.device!r}; there are cpu, cuda, cuda:1"
            ) from error
        if place.type == "cuda" and (place.index or 0) >= gpus:
            raise RopeExtendError(f"there is no {self.device!r} here: {gpus} GPUs are to be had")
        if place.type == "mps" and not torch.backends.mps.is_available():
            raise RopeExtendError("there is no 'mps' device here; leave device out")
        return place

    def empty(self, name: str) -> nn.Module:
        """The model of a checkpoint with this attention, on the meta device: no weights are read.

        Raises:
            RopeExtendError: no such checkpoint, no adapter for its family, or it cannot be loaded so.
        """
        config = self._config(name)
        adapter_for(config.model_type)
        own = {"dtype": dtype} if (dtype := self._dtype(config)) != "auto" else {}
        try:
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(config, **own, **self._attention())
        except (ValueError, ImportError) as error:
            if self.attention is None:
                raise
            raise RopeExtendError(f"{name!r} cannot be read with {self.attention}: {error}") from error
        return model

    def load(self, name: str, *, reserve: int = 0) -> nn.Module:
        """The model of a checkpoint, as these options say, in evaluation mode.

        Args:
            name: a checkpoint's directory or hub id.
            reserve: bytes of each device that a `device_map` leaves free of weights.

        Raises:
            RopeExtendError: no such checkpoint, or it cannot be loaded so.
        """
        config, place = self._config(name), self.place
        if self.limit_memory is not None and place.type == "cuda":
            every = range(torch.cuda.device_count()) if self.device_map is not None else [place]
            for gpu in every:
                total = torch.cuda.get_device_properties(gpu).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_memory / total), gpu)
        arguments: dict[str, Any] = {"dtype": self._dtype(config), **self._attention()}
        if self.quantize is not None:
            arguments["quantization_config"] = quantization(self.quantize, place)
        if self.device_map is not None:
            arguments["device_map"] = self.device_map
            if isinstance(self.device_map, str):
                arguments["max_memory"] = self._rooms(reserve)
        elif place.type != "cpu" or self.quantize or is_quantized(config):
            arguments["device_map"] = {"": place}
        return pretrained(AutoModelForCausalLM, name, **arguments).eval()

    def _config(self, name: str) -> Any:
        config = pretrained(AutoConfig, name)
        if self.quantize is not None and is_quantized(config):
            raise RopeExtendError(f"{name!r} is quantised already; leave quantize out")
        return config

    def _dtype(self, config: Any) -> torch.dtype | str:
        """Of a quantised checkpoint its own: what is not quantised in it was made for that."""
        return self.dtype or ("auto" if is_quantized(config) else default_dtype(self.place))

    def _attention(self) -> dict[str, str]:
        return {} if self.attention is None else {"attn_implementation": self.attention}

    def _rooms(self, reserve: int) -> dict[int | str, int]:
        """How many bytes of weights each device may take; without a GPU, what is over goes to disk."""
        rooms: dict[int | str, int] = get_max_memory()
        limited = [key for key in rooms if key != "cpu"] or ["cpu"]
        for key in limited:
            room = rooms[key] if self.limit_memory is None else min(rooms[key], self.limit_memory)
            rooms[key] = max(0, room - reserve)
        return rooms

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """From what :func:`add_hardware_arguments` added."""
        return cls(
            device=arguments.device,
            device_map=arguments.device_map,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            attention=arguments.attn,
            quantize=arguments.quantize,
            limit_memory=arguments.limit_memory,
        )


def quantization(kind: str, place: torch.device) -> BitsAndBytesConfig:
    """How bitsandbytes quantises weights as they are read: `4bit` is NF4, `8bit` is LLM.int8()."""
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=default_dtype(place)
    )


def is_quantized(config: Any) -> bool:
    """Whether a checkpoint's weights are quantised already."""
    return getattr(config, "quantization_config", None) is not None


def input_device(model: Any) -> torch.device:
    """Where a model takes its token ids, also where its weights are elsewhere until they are needed."""
    embeddings = getattr(model, "get_input_embeddings", None)
    if embeddings is None:
        return torch.device(model.device)
    embedding = embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    place: torch.device = embedding.weight.device
    return place


def is_spread(model: nn.Module) -> bool:
    """Whether hooks of accelerate bring a model's weights and inputs together: then it must not be moved."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def memory_size(text: str) -> int:
    """Bytes of `20GB`, `1.5GiB`, `512M` or a plain number; for argparse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"a size, such as 20GB or 512MiB: {text!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(prefix or " ")))


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """The options from which :meth:`Hardware.from_arguments` reads."""
    group = parser.add_argument_group("hardware")
    group.add_argument("--device", help="such as cuda:1 (default: the GPU, if there is one)")
    group.add_argument(
        "--device-map", choices=MAPS,
        help="spread the model over all GPUs, and what does not fit over the host's memory and disk",
    )  # fmt: skip
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the weights (default: bfloat16 on a GPU that has it, else float32)",
    )
    group.add_argument("--attn", choices=ATTENTION, help="attention kernels (default: sdpa)")
    group.add_argument("--quantize", choices=QUANTIZED, help="the weights, by bitsandbytes, as they are read")
    group.add_argument(
        "--limit-memory", type=memory_size, metavar="SIZE",
        help="use no more of a device than this, such as 20GB",
    )  # fmt: skip
