"""How a model is loaded: devices, dtype, attention implementation, quantization.

Every command that loads a model has these options. Combinations that cannot work are refused before any
weights are loaded.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from rope_extend.checks import Checked, choice, such
from rope_extend.errors import RopeExtendError
from rope_extend.models.config_facts import is_soft_capped
from rope_extend.models.gguf_checkpoint import gguf_file, how_to_convert
from rope_extend.models.load_choices import ATTENTION, DEVICE_MAPS, QUANTIZED
from rope_extend.models.loading import default_dtype, empty_model, pretrained
from rope_extend.models.processes import process_count

_DEVICE_MAP = such(
    f"one of {', '.join(DEVICE_MAPS)}, or a mapping",
    lambda value: isinstance(value, dict) or value in DEVICE_MAPS,
)


@dataclass(frozen=True)
class LoadOptions(Checked):
    """How a model is loaded. The defaults depend on the machine.

    Attributes:
        device: device of the whole model, such as `cuda:1`; by default the GPU, if there is one. A process of
            `torchrun` uses the GPU of its local rank.
        device_map: spread the model over several GPUs, then host memory and disk: `auto`, another of
            accelerate's strategies, or a device for each module by name.
        dtype: dtype of the weights; by default bfloat16 on a GPU with hardware for it, else float32. A
            quantised checkpoint keeps its own.
        attention: attention implementation, by transformers' name; by default sdpa, and eager if scores are
            soft-capped, because sdpa has no cap.
        quantize: quantize the weights with bitsandbytes while loading: `4bit` (NF4) or `8bit`.
        limit_memory: bytes that may be used on a device. On a GPU the allocator enforces the limit.
        split_window: number of processes that share each window; estimates are for one of them.

    Raises:
        RopeExtendError: two options contradict each other, or this machine cannot provide them.
    """

    device: str | None = None
    device_map: Annotated[str | dict[str, Any] | None, _DEVICE_MAP] = None
    dtype: torch.dtype | None = None
    attention: Annotated[str | None, choice(*ATTENTION)] = None
    quantize: Annotated[str | None, choice(*QUANTIZED)] = None
    limit_memory: int | None = None
    split_window: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device is not None and self.device_map is not None:
            raise RopeExtendError(
                f"device={self.device!r} and device_map={self.device_map!r} contradict each other; give "
                "a device for the whole model or a device_map to spread it, not both"
            )
        if self.device_map is not None and process_count() > 1:
            raise RopeExtendError(
                f"device_map spreads one model over all GPUs, which works in one process only; "
                f"{process_count()} were started. Start one, or leave device_map out"
            )
        if self.quantize is not None and importlib.util.find_spec("bitsandbytes") is None:
            raise RopeExtendError(f"quantize={self.quantize!r} needs bitsandbytes: pip install bitsandbytes")
        device = self.torch_device  # refuses a device that does not exist
        if self.attention not in (None, "sdpa", "eager") and device.type != "cuda":
            raise RopeExtendError(
                f"attention {self.attention} needs a GPU, but the device is {device.type}; use sdpa, "
                "which runs everywhere"
            )

    @classmethod
    def of(cls, settings: object) -> Self:
        """The options among the attributes of settings or of a command's arguments, with a dtype by name."""
        given: dict[str, Any] = {
            item.name: getattr(settings, item.name, item.default) for item in fields(cls)
        }
        return cls(**given | {"dtype": getattr(torch, given["dtype"]) if given["dtype"] else None})

    @property
    def torch_device(self) -> torch.device:
        """The device of the model, or of its first layers if it is spread."""
        gpus = torch.cuda.device_count()
        if self.device is None:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            return torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise RopeExtendError(
                f"no device is called {self.device!r}; use cpu, cuda, cuda:1, or mps"
            ) from error
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise RopeExtendError(
                f"this machine has no device {self.device!r}: it has {gpus} GPUs; leave device out"
            )
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise RopeExtendError("this machine has no device 'mps'; leave device out")
        return device

    def empty(self, name: str) -> nn.Module:
        """The model of a checkpoint with this attention, on the meta device: no weights are loaded."""
        config = self._config(name)
        arguments: dict[str, Any] = dict(self._attention(config))
        if (dtype := self._dtype(config)) != "auto":
            arguments["dtype"] = dtype
        return empty_model(name, config, **arguments)

    def load(self, name: str, *, reserve: int = 0) -> nn.Module:
        """The model of a checkpoint, as these options say, in evaluation mode.

        Args:
            name: a checkpoint's directory or hub id.
            reserve: bytes of each device that a `device_map` leaves free of weights.

        Raises:
            RopeExtendError: no such checkpoint, or it cannot be loaded this way.
        """
        return pretrained(AutoModelForCausalLM, name, **self.arguments(name, reserve=reserve)).eval()

    def arguments(self, name: str, *, reserve: int = 0) -> dict[str, Any]:
        """The arguments for `from_pretrained` with which `load` loads a checkpoint."""
        config, device = self._config(name), self.torch_device
        if self.limit_memory is not None and device.type == "cuda":
            gpus = range(torch.cuda.device_count()) if self.device_map is not None else [device]
            for gpu in gpus:
                total = torch.cuda.get_device_properties(gpu).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_memory / total), gpu)
        arguments: dict[str, Any] = {"dtype": self._dtype(config), **self._attention(config)}
        if self.quantize is not None:
            arguments["quantization_config"] = BitsAndBytesConfig(
                load_in_8bit=self.quantize == "8bit", load_in_4bit=self.quantize == "4bit",
                bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=default_dtype(device),
            )  # fmt: skip
        if self.device_map is not None:
            arguments["device_map"] = self.device_map
            if isinstance(self.device_map, str):
                arguments["max_memory"] = self._memory_for_weights(reserve)
        elif device.type != "cpu" or self.quantize or is_quantized(config):
            arguments["device_map"] = {"": device}
        return arguments

    def _config(self, name: str) -> Any:
        config = pretrained(AutoConfig, name)
        if self.attention == "sdpa" and is_soft_capped(config):
            raise RopeExtendError(
                f"{name!r} caps its attention scores (attn_logit_softcapping), which sdpa cannot; use "
                "attention eager, flash_attention_2 or flex_attention"
            )
        if self.quantize is not None and is_quantized(config):
            raise RopeExtendError(f"{name!r} is already quantised; leave quantize out")
        if self.quantize is not None and (path := gguf_file(name)) is not None:
            raise RopeExtendError(
                f"{path.name} cannot be quantised again while it is loaded. Leave quantize out, or "
                f"{how_to_convert(path)}"
            )
        return config

    def _dtype(self, config: Any) -> torch.dtype | str:
        """The dtype of the weights; `auto` for quantised checkpoints, which keep their own."""
        return self.dtype or ("auto" if is_quantized(config) else default_dtype(self.torch_device))

    def _attention(self, config: Any) -> dict[str, str]:
        if self.attention is not None:
            return {"attn_implementation": self.attention}
        return {"attn_implementation": "eager"} if is_soft_capped(config) else {}

    def _memory_for_weights(self, reserve: int) -> dict[int | str, int]:
        """Bytes of weights that each device may take; without a GPU, the rest goes to disk."""
        from accelerate.utils import get_max_memory

        memory: dict[int | str, int] = get_max_memory()
        for key in [key for key in memory if key != "cpu"] or ["cpu"]:
            limit = memory[key] if self.limit_memory is None else min(memory[key], self.limit_memory)
            memory[key] = max(0, limit - reserve)
        return memory


def is_quantized(config: Any) -> bool:
    """Whether a checkpoint's weights are already quantised."""
    return getattr(config, "quantization_config", None) is not None


def input_device(model: Any) -> torch.device:
    """The device of a model's token ids, also if its weights are on another device until they are used."""
    embeddings = getattr(model, "get_input_embeddings", None)
    if embeddings is None:
        return torch.device(model.device)
    embedding = embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    weight_device: torch.device = embedding.weight.device
    return weight_device
