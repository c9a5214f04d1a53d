"""What acts inside attention runs on GPUs too, shown without one: devices, kernels and host reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import LENGTH, same, tokens
from cases import FACTOR, TARGET, llama
from logical_devices import inputs, spread
from torch import Tensor
from transformers import DynamicCache
from transformers.integrations import flash_attention

import rope_extend as rx

YARN = {"name": "yarn", "factor": FACTOR}
INSIDE: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "dynamic_ntk": {"name": "dynamic_ntk", "factor": FACTOR},
    "short_original(yarn)": {"name": "short_original", "inner": YARN},
    "logn(yarn)": {"name": "logn", "inner": YARN},
    "xpos(linear)": {"name": "xpos", "inner": {"name": "linear", "factor": FACTOR}},
    "drope": {"name": "drope", "factor": FACTOR},
    "alibi": {"name": "alibi"},
    "t5_bias": {"name": "t5_bias"},
    "fire": {"name": "fire"},
    "shaw": {"name": "shaw"},
    "linear_attention": {"name": "linear_attention"},
    "sinusoidal": {"name": "sinusoidal"},
}


def extended(model: Any, name: str) -> rx.Patch:
    return rx.patch_model(model, rx.Encoding.from_dict(INSIDE[name]), target_length=TARGET)


@torch.no_grad()
def cached_logits(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits of a text in two parts and of one more token, with a cache."""
    cache = DynamicCache(config=model.config)
    return [model(part, past_key_values=cache).logits for part in ids.tensor_split([LENGTH // 2, -1], dim=1)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"]], ids=len)
@pytest.mark.parametrize("name", INSIDE)
def test_a_model_may_be_on_any_devices(name: str, devices: list[str], implementation: str) -> None:
    """Layers on another GPU get copies of positions, cos and sin."""
    model, ids = llama(attn_implementation=implementation), tokens(1, LENGTH)
    with extended(model, name):
        expected = cached_logits(model, ids)
        with spread(model, *devices):
            found = cached_logits(model, inputs(ids, devices[0]))
        for ours, theirs in zip(found, expected, strict=True):
            same(ours, theirs)


@pytest.mark.parametrize("name", ["dynamic_ntk", "short_original(yarn)", "logn(yarn)", "xpos(linear)"])
def test_flash_attention_finds_its_kernel_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own function, which loads the kernel that the module's config names."""
    names = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        names.append(kwargs["attn_implementation"])
        assert mask is None
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(
            key.shape[1] - query.shape[1]
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            *(states.transpose(1, 2) for states in (query, key, value)), attn_mask=allowed,
            scale=kwargs["softmax_scale"], enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    model, ids = llama(), tokens(1, LENGTH)
    with extended(model, name):
        expected = cached_logits(model, ids)
        model.config._attn_implementation_internal = "flash_attention_2"
        for ours, theirs in zip(cached_logits(model, ids), expected, strict=True):
            same(ours, theirs)
    assert set(names) == {"flash_attention_2"}
