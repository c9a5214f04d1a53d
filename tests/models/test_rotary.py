"""The numbers of our rotary module stay exact through all operations on a model."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import tokens
from cases import (
    ALTERNATIVES,
    ENCODINGS,
    FACTOR,
    SECTIONS,
    TARGET,
    TRAINED,
    AlternativeCase,
    EncodingCase,
    FamilyCase,
    llama,
    tiny_model,
)
from covering import few
from tolerances import assert_same_but_rounding
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import rope_extend as rx
from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.models.decoders import unwrap
from rope_extend.models.families import family_for
from rope_extend.models.rotary import ExtendedRotaryEmbedding, float64_device
from rope_extend.models.rotary_tables import shape_of

FAR = 2_097_151
BF16_ROUNDING = 2e-3
POSITIONS = torch.tensor([[0, 1, 255, 4096, 65_537, 1_000_003, FAR - 1, FAR]])
YARN = rx.encoding("yarn", factor=FACTOR)


def expected(
    encoding: RopeEncoding, shape: RopeShape, positions: Tensor = POSITIONS
) -> tuple[Tensor, Tensor]:
    """cos and sin `[1, T, dim/2]` by definition, in float64."""
    angles = positions[..., None].double() * encoding.inv_freq(shape)
    factor = encoding.attention_factor(shape)
    return angles.cos() * factor, angles.sin() * factor


def rotary(model: nn.Module) -> ExtendedRotaryEmbedding:
    module = unwrap(model).base_model.rotary_emb
    assert isinstance(module, ExtendedRotaryEmbedding)
    return module


def assert_exact(model: nn.Module, dtype: torch.dtype, tolerance: float) -> None:
    module = rotary(model)
    cos, sin = module(torch.zeros(1, dtype=dtype), POSITIONS)
    assert cos.dtype == sin.dtype == dtype
    want_cos, want_sin = expected(module.encoding, module.shape)
    half = module.shape.dim // 2
    for got, want in ((cos, want_cos), (sin, want_sin)):
        assert (got[..., :half].double() - want).abs().max() <= tolerance
        assert torch.equal(got[..., :half], got[..., half:])
    assert module.inv_freq.dtype == torch.float32


@pytest.fixture
def patched() -> LlamaForCausalLM:
    model = llama(hidden_size=128, head_dim=64)
    # An attention factor of 1 keeps cos within 1, where bf16's rounding step is 2^-8.
    rx.patch_model(model, rx.encoding("linear", factor=FACTOR))
    return model


def test_the_stock_module_is_not_exact_there() -> None:
    """The failure that this module avoids; if this test fails, transformers has fixed it."""
    model = llama(hidden_size=128, head_dim=64).to(torch.bfloat16)
    cos, _ = model.base_model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), POSITIONS)
    want, _ = expected(rx.encoding("none"), RopeShape(64, 10_000.0, TRAINED))  # type: ignore[arg-type]
    assert (cos[..., :32].double() - want).abs().max() > 1


def saved_by_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


OPERATIONS: dict[str, Callable[[Any], nn.Module]] = {
    "none": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "float64": lambda model: model.double(),
    "device and dtype": lambda model: model.to("cpu", torch.bfloat16).float().half(),
    "copy": lambda model: copy.deepcopy(model.to(torch.bfloat16)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model.to(torch.bfloat16))),
    "torch.save": lambda model: saved_by_torch(model.to(torch.bfloat16)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_exact_at_two_million_whatever_happens_to_the_model(patched: LlamaForCausalLM, name: str) -> None:
    model = OPERATIONS[name](patched)
    assert_exact(model, torch.bfloat16, BF16_ROUNDING)
    assert_exact(model, torch.float16, 3e-4)
    assert_exact(model, torch.float32, 1e-6)


def test_the_first_tokens_of_longrope_keep_their_angles() -> None:
    """Of equal lists, which one table serves; `tests/attention/test_attention.py` has those of two tables."""
    factors = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0]
    encoding = rx.encoding(
        "longrope", factor=FACTOR, long_factor=factors, short_factor=factors, start_tokens=50
    )
    assert not encoding.depends_on_length
    assert isinstance(encoding, RopeEncoding)
    model = llama()
    shape = RopeShape(16, 10_000.0, TRAINED)
    stock: Any = model.model.rotary_emb
    module = ExtendedRotaryEmbedding(encoding, shape, stock, family_for("llama"), model.config)
    positions = torch.tensor([[0, 1, 49, 50, 51, 5_000]])
    divisors = torch.tensor(factors, dtype=torch.float64).expand(1, 6, 8).clone()
    divisors[:, :3] = 1
    angles = positions[..., None] * 10_000 ** (-torch.arange(8, dtype=torch.float64) / 8) / divisors
    cos, sin = module(torch.zeros(1), positions)
    scale = encoding.attention_factor(module.shape)
    torch.testing.assert_close(cos[..., :8].double(), angles.cos() * scale, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin[..., :8].double(), angles.sin() * scale, rtol=0, atol=2e-7)


def test_positions_with_parts_need_one_table() -> None:
    """Images have a height and a width. Equal parts are one position."""
    model = tiny_model(FamilyCase("qwen3_5_text", SECTIONS))
    text = torch.arange(20).expand(3, 1, 20)
    image = text.clone()
    image[1, :, 5:15] = 5 + torch.arange(10) // 5
    with rx.patch_model(model, rx.encoding("dynamic_linear"), target_length=TARGET):
        module = rotary(model)
        cos, _ = module(torch.zeros(1, 20, 1), text)
        assert torch.equal(cos, module(torch.zeros(1, 20, 1), text[0])[0])
        with pytest.raises(rx.PatchError, match=r"needs one position for each token.*use a static schedule"):
            module(torch.zeros(1, 20, 1), image)


def image_between_texts(length: int) -> torch.Tensor:
    """Positions `[3, 1, T]`: text, an image of 4 x 4 tokens, and text that goes on after it."""
    positions = torch.arange(length).expand(3, 1, length).clone()
    inside = torch.arange(16)
    positions[:, 0, 10:26] = torch.stack([torch.full((16,), 10), 10 + inside // 4, 10 + inside % 4])
    positions[:, :, 26:] -= 12
    return positions


@pytest.mark.parametrize("case", few([*ENCODINGS, *ALTERNATIVES], 2), ids=str)
@torch.no_grad()
def test_positions_with_parts_are_exact_or_refused_by_name(case: EncodingCase | AlternativeCase) -> None:
    """A static table is exact for each part: compared with the stock module, with that table in it."""
    model, stock = (tiny_model(FamilyCase("qwen3_5_text", SECTIONS)) for _ in range(2))
    shape = shape_of(model)
    encoding = case.build(shape) if isinstance(case, EncodingCase) else case.build()
    ids, image = tokens(1, 40), image_between_texts(40)
    text = torch.arange(40)[None]
    with rx.patch_model(model, encoding, target_length=TARGET):
        equal_parts = model(ids, position_ids=text.expand(3, 1, 40), use_cache=False).logits
        assert torch.equal(equal_parts, model(ids, position_ids=text, use_cache=False).logits)
        static = isinstance(encoding, RopeEncoding) and not (encoding.depends_on_length or encoding.remaps)
        if not static or case.name in ("logn", "xpos", "drope"):
            with pytest.raises(rx.PatchError, match=rf"^{re.escape(str(encoding))} needs one position"):
                model(ids, position_ids=image, use_cache=False)
            return
        actual = model(ids, position_ids=image, use_cache=False).logits
    assert isinstance(encoding, RopeEncoding)
    rotary_of_stock = stock.base_model.rotary_emb
    rotary_of_stock.inv_freq = encoding.inv_freq(shape).float()
    rotary_of_stock.attention_scaling = encoding.attention_factor(shape)
    assert_same_but_rounding(actual, stock(ids, position_ids=image, use_cache=False).logits)
    assert not torch.allclose(actual, equal_parts, atol=0.01) or case.name == "nope"


def test_a_copy_owns_its_patch(patched: LlamaForCausalLM) -> None:
    twin = copy.deepcopy(patched)
    patch = rx.current_patch(twin)
    assert patch is not None
    patch.remove()
    assert rx.current_patch(twin) is None
    assert not isinstance(twin.base_model.rotary_emb, ExtendedRotaryEmbedding)
    assert_exact(patched, torch.bfloat16, BF16_ROUNDING)


def test_meta_device_and_to_empty() -> None:
    config = llama(hidden_size=128, head_dim=64).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    patch = rx.patch_model(model, rx.encoding("linear", factor=FACTOR))
    model.to_empty(device="cpu")
    assert_exact(model, torch.bfloat16, BF16_ROUNDING)
    # transformers refills rotary buffers through this hook after a meta-device load
    rotary(model).inv_freq.fill_(torch.nan)
    model._init_weights(rotary(model))
    torch.testing.assert_close(
        rotary(model).inv_freq.double(), patch.encoding.inv_freq(patch.shape), rtol=1e-6, atol=0
    )
    patch.remove()  # the stock module stayed on meta while the patch was active
    cos, _ = model.base_model.rotary_emb(torch.zeros(1), torch.arange(TRAINED)[None])
    want, _ = expected(rx.encoding("none"), patch.shape, torch.arange(TRAINED)[None])  # type: ignore[arg-type]
    torch.testing.assert_close(cos[..., :32].double(), want, rtol=0, atol=1e-5)


def test_apples_gpus_get_angles_from_the_cpu(
    patched: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no float64. The meta device stands for one of them: no angle may be computed there."""
    assert float64_device(torch.device("mps")) == torch.device("cpu")
    assert float64_device(torch.device("cuda:1")) == torch.device("cuda:1")
    monkeypatch.setattr("rope_extend.models.rotary.float64_device", lambda device: torch.device("cpu"))
    module = rotary(patched.to(torch.bfloat16))
    cos, _ = module(torch.zeros(1, dtype=torch.bfloat16, device="meta"), POSITIONS)
    assert cos.device.type == "meta"
    assert module._table.device.type == "cpu"
    assert_exact(patched, torch.bfloat16, BF16_ROUNDING)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_exact_on_a_gpu(patched: LlamaForCausalLM) -> None:
    module = rotary(patched.to("cuda", torch.bfloat16))
    cos, _ = module(torch.zeros(1, dtype=torch.bfloat16, device="cuda"), POSITIONS.cuda())
    want, _ = expected(module.encoding, module.shape)
    assert (cos[..., : module.shape.dim // 2].cpu().double() - want).abs().max() <= BF16_ROUNDING


def test_repr_shows_the_encoding(patched: LlamaForCausalLM) -> None:
    assert "linear(factor=8), dim=64, trained_length=32" in repr(patched)
