"""The attention implementation may change while an encoding acts inside attention: the handler follows."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import LENGTH, batch, in_parts, logits, same, tokens
from cases import TARGET, llama, tiny_model
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

import rope_extend as rx
from rope_extend.attention.functions import handled_implementation
from rope_extend.errors import UnsupportedModelError
from rope_extend.models.parameters import learned_parameters

METHODS = ("dynamic_ntk", "short_original(yarn)", "logn(linear)", "alibi", "fire", "shaw", "linear_attention")
CHANGES: dict[str, Callable[[Any, str], None]] = {
    "method": lambda model, name: model.set_attn_implementation(name),
    "config": lambda model, name: setattr(model.config, "_attn_implementation", name),
    "dict": lambda model, name: model.set_attn_implementation({"": name}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("method", METHODS)
def test_a_change_equals_a_patch_under_the_new_implementation(method: str, change: Any) -> None:
    model, data = llama(), batch((0, 17))
    expected, plain = {}, {}
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        plain[name] = logits(model, **data)
        with rx.extend(model, TARGET, method):
            expected[name] = logits(model, **data)
    assert not torch.equal(expected["sdpa"], expected["eager"]) or method == "linear_attention"
    patch = rx.extend(model, TARGET, method)
    for name in ("sdpa", "eager", "sdpa", "eager"):
        change(model, name)
        assert model.config._attn_implementation == name
        assert torch.equal(logits(model, **data), expected[name])
    patch.remove()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(logits(model, **data), plain["eager"])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.set_attn_implementation({"text_config": "eager"}),
        lambda model: setattr(model.config, "_attn_implementation", "eager"),
        lambda model: setattr(model.config.text_config, "_attn_implementation", "eager"),
    ],
    ids=["all", "text", "config", "text-config"],
)
@pytest.mark.parametrize("name", ["dynamic_ntk", "alibi"])
def test_a_sub_config_is_followed(name: str, change: Any) -> None:
    model, data = tiny_model("gemma3"), batch((0, 17))
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    with rx.extend(model, TARGET, name), rx.extend(twin, TARGET, name):
        before = logits(model, **data)
        change(model)
        assert torch.equal(logits(model, **data), logits(twin, **data))
        model.set_attn_implementation("sdpa")
        assert torch.equal(logits(model, **data), before)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert twin.config.text_config._attn_implementation == "eager"


@pytest.mark.parametrize("name", [name for name in METHODS if name != "linear_attention"])
def test_attentions_are_returned_under_eager(name: str) -> None:
    model, input_ids = llama(), tokens(2, LENGTH)
    with rx.extend(model, TARGET, name):
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        output = model(input_ids)
        with torch.no_grad():
            asked = model(input_ids, output_attentions=True).attentions
        generated = model.generate(
            input_ids[:, :30],
            max_new_tokens=5,
            return_dict_in_generate=True,
            output_attentions=True,
            pad_token_id=0,
        )
    for weights, again in zip(output.attentions, asked, strict=True):
        assert torch.equal(weights, again)
        assert weights.shape == (2, 2, LENGTH, LENGTH)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, LENGTH), rtol=0, atol=1e-5)
        assert not weights.triu(1).any()
    assert len(generated.attentions) == 5


def test_gradients_reach_the_attentions_of_one_table() -> None:
    """The returned weights are those that were used, as transformers' own tests require."""
    model = llama()
    with rx.extend(model, TARGET, "dynamic_ntk"):
        model.set_attn_implementation("eager")
        output = model(tokens(2, 20), output_attentions=True)
        weights = output.attentions[0]
        weights.retain_grad()
        output.logits[0, -1, 7].backward()
    assert weights.grad is not None


@pytest.mark.parametrize("method", METHODS)
def test_a_patch_leaves_no_trace_in_the_config(method: str) -> None:
    model = llama()
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    with rx.extend(model, TARGET, method):
        assert model.config._attn_implementation == "sdpa"
        other = AutoModelForCausalLM.from_config(model.config).eval()
        assert other.config._attn_implementation == "sdpa"
        assert not any("rope_extend" in str(module.config._attn_implementation) for module in layers(other))
        for module in layers(model):
            twin = pickle.loads(pickle.dumps(module.config))
            assert twin._attn_implementation == module.config._attn_implementation
            assert twin.hidden_size == model.config.hidden_size
    after = [module.config for module in model.modules() if hasattr(module, "config")]
    assert all(one is other for one, other in zip(configs, after, strict=True))


def layers(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("method", METHODS)
def test_copies_follow_their_own_config(method: str) -> None:
    model, data = llama(), batch((0, 17))
    with rx.extend(model, TARGET, method):
        before = logits(model, **data)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.set_attn_implementation("eager")
            changed = logits(twin, **data)
            assert torch.equal(logits(model, **data), before)
            same(in_parts(twin, data, [40, LENGTH]), changed, data)
            twin.set_attn_implementation("sdpa")
            assert torch.equal(logits(twin, **data), before)
            for name, value in learned_parameters(twin).items():
                assert value is not learned_parameters(model)[name]
                with torch.no_grad():
                    value.zero_()
        assert torch.equal(logits(model, **data), before)


def test_nested_patches_follow() -> None:
    model, data = llama(), batch((0, 17))
    model.set_attn_implementation("eager")
    with rx.extend(model, TARGET, "dynamic_ntk"):
        expected = logits(model, **data)
    model.set_attn_implementation("sdpa")
    with rx.extend(model, TARGET, "dynamic_ntk"):
        with rx.extend(model, TARGET, "alibi"):
            model.set_attn_implementation("eager")
        with rx.extend(model, TARGET, "linear"):
            assert model.config._attn_implementation == "eager"
        assert torch.equal(logits(model, **data), expected)


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("name", ["dynamic_ntk", "self_extend", "alibi", "linear_attention"])
def test_a_change_to_what_does_not_work_is_refused_by_name(name: str, implementation: str) -> None:
    model, data = llama(), batch((0,))
    with rx.extend(model, TARGET, name):
        before = logits(model, **data)
        model.config._attn_implementation_internal = implementation
        with pytest.raises(UnsupportedModelError, match=rf"^{name}.*{implementation}.*'sdpa' or 'eager'"):
            model(**data)
        model.set_attn_implementation("sdpa")
        assert torch.equal(logits(model, **data), before)


def test_an_implementation_without_a_mask_is_refused_by_name() -> None:
    AttentionInterface.register("test_no_mask", lambda *args, **kwargs: pytest.fail("called"))
    model = llama()
    with rx.extend(model, TARGET, "dynamic_ntk"):
        model.set_attn_implementation("test_no_mask")
        with pytest.raises(UnsupportedModelError, match="'test_no_mask' has no mask function"):
            model(tokens(1, 10))


def _by_name(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of a user's own, which calls the one that the config names."""
    NAMES.append(module.config._attn_implementation)
    known = {"sdpa": sdpa_attention_forward, "eager": modeling_llama.eager_attention_forward}
    return known[NAMES[-1]](module, *args, **kwargs)


NAMES: list[str] = []
"""The names that `_by_name` saw."""


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_users_function_under_a_name_of_transformers_sees_that_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a prefill and in a step of decoding; once, as it does not call the handler again."""
    model, input_ids = llama(), tokens(1, LENGTH)
    model.set_attn_implementation(name)
    with rx.extend(model, TARGET, "dynamic_ntk"), torch.no_grad():
        expected = logits(model, input_ids)
        monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._local_mapping, name, _by_name)
        NAMES.clear()
        cache = model(input_ids[:, :-2]).past_key_values
        found = [model(part, past_key_values=cache).logits for part in input_ids[:, -2:].split(1, dim=1)]
    assert set(NAMES) == {name}
    same(torch.cat(found, dim=1), expected[:, -2:])


def test_the_own_name_is_not_seen_in_another_thread() -> None:
    """Otherwise a forward in the other thread would skip the handler without an error."""
    seen = []

    def attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        thread = threading.Thread(target=lambda: seen.append(module.config._attn_implementation))
        thread.start()
        thread.join()
        return AttentionInterface()["sdpa"](module, *args, **kwargs)

    AttentionInterface.register("test_threads", attention)
    AttentionMaskInterface.register("test_threads", sdpa_mask)
    model = llama()
    with rx.extend(model, TARGET, "dynamic_ntk"):
        model.set_attn_implementation("test_threads")
        expected = {module.config._attn_implementation for module in layers(model)}
        logits(model, tokens(1, LENGTH))
    assert expected == {handled_implementation("test_threads")}
    assert set(seen) == expected
