"""The checks that transformers applies to its own models, applied to a patched one.

Three families are patched with `none` and with `yarn`. With `none` the model must equal the stock model. With
`yarn` it must equal stock transformers' own YaRN. The oracle is a stock model of the same weights that
rope_extend never touched. A check without a stock side, such as a cast, states its own condition.
"""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights
from accelerate.hooks import remove_hook_from_submodules
from batches import tokens
from cases import TARGET, FamilyCase, llama, scaling, tiny_config, tiny_model
from covering import few
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache
from transformers.modeling_utils import local_torch_dtype

import rope_extend as rx
from rope_extend.models.parameters import read_learned, write_learned
from rope_extend.models.rotary import ExtendedRotaryEmbedding

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 2e-4}
"""Our angles are float64, the stock module's float32; the difference in logits of size 1."""
PAD = {"pad_token_id": 0}
FAMILIES = [
    FamilyCase("llama", PAD),
    # Narrower than the texts below, so that the window moves.
    FamilyCase("mistral", {**PAD, "sliding_window": 24}),
    FamilyCase("qwen2", PAD),
]


@dataclass(frozen=True)
class Setup:
    """One family and one method; makes the patched model, and the stock one that it must equal."""

    family: FamilyCase
    method: str

    def __str__(self) -> str:
        return f"{self.family}-{self.method}"

    @property
    def stock_case(self) -> FamilyCase:
        if self.method == "none":
            return self.family
        scaled = {"rope_parameters": scaling("yarn"), "max_position_embeddings": TARGET}
        return FamilyCase(self.family.model_type, {**self.family.config, **scaled})

    def stock(self) -> PreTrainedModel:
        return tiny_model(self.stock_case)

    def patch(self, model: Any) -> rx.Patch:
        if self.method == "none":
            return rx.patch_model(model, rx.encoding("none"))
        return rx.extend(model, TARGET, self.method)

    def patched(self) -> PreTrainedModel:
        model = tiny_model(self.family)
        self.patch(model)
        return model


SETUPS = [Setup(family, method) for family in FAMILIES for method in ("none", "yarn")]


@pytest.fixture(params=few(SETUPS, 3, 1), ids=str, scope="module")
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture(scope="module")
def stock(setup: Setup) -> PreTrainedModel:
    """The oracle. Shared: a test that changes a model makes its own."""
    return setup.stock()


@pytest.fixture(scope="module")
def patched(setup: Setup) -> PreTrainedModel:
    """The model under test. Shared, as above."""
    return setup.patched()


IDS = tokens(2, 60)
"""Longer than the trained window and than Mistral's sliding one."""


@torch.no_grad()
def logits(model: Any, input_ids: Tensor = IDS, **inputs: Any) -> Tensor:
    return model(input_ids, **inputs).logits


def stand_in(model: Any) -> ExtendedRotaryEmbedding:
    """The replaced rotary module of a patched causal or base model."""
    module = model.base_model.rotary_emb
    assert isinstance(module, ExtendedRotaryEmbedding)
    return module


def assert_alike(model: Any, stock: Any, input_ids: Tensor = IDS) -> None:
    torch.testing.assert_close(logits(model, input_ids), logits(stock, input_ids), **CLOSE)


def test_the_oracle_is_untouched_and_of_the_same_weights(
    setup: Setup, stock: PreTrainedModel, patched: PreTrainedModel
) -> None:
    assert type(stock.base_model.rotary_emb).__module__.startswith("transformers.")
    assert stock.base_model.rotary_emb.rope_type == ("default" if setup.method == "none" else "yarn")
    for (name, ours), theirs in zip(patched.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert_alike(patched, stock)
    # Wrong positions change the logits, or no test below could fail.
    shifted = torch.arange(IDS.shape[1]).expand(2, -1) * 2
    assert (logits(stock) - logits(stock, position_ids=shifted)).abs().max() > 0.1


def saved_keys(directory: Path) -> dict[str, set[str]]:
    """The tensors in each safetensors file of a checkpoint."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found[path.name] = set(file.keys())
    return found


def reload(directory: Path, **options: Any) -> PreTrainedModel:
    """Load with stock transformers, which must find exactly the tensors it expects."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(problem), problem
    return model.eval()


@pytest.mark.parametrize(
    "form",
    [{}, {"max_shard_size": "8KB"}, {"variant": "other"}, {"state_dict": True}],
    ids=["whole", "sharded", "variant", "given-state"],
)
def test_what_is_saved_is_what_stock_saves(
    setup: Setup, stock: PreTrainedModel, patched: PreTrainedModel, form: dict[str, Any], tmp_path: Path
) -> None:
    for name, model in (("stock", stock), ("ours", patched)):
        options = {**form, **({"state_dict": model.state_dict()} if "state_dict" in form else {})}
        model.save_pretrained(tmp_path / name, **options)
    assert saved_keys(tmp_path / "ours") == saved_keys(tmp_path / "stock")
    assert (len(saved_keys(tmp_path / "ours")) > 3) == ("max_shard_size" in form)
    written, expected = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "stock")
    )
    assert written.pop("rope_extend")["encoding"]["name"] == setup.method
    # A stock form may spell out defaults; it may not say anything else.
    assert expected.pop("rope_parameters").items() <= written.pop("rope_parameters").items()
    assert written == expected
    variant = {"variant": form["variant"]} if "variant" in form else {}
    again = reload(tmp_path / "ours", **variant)
    assert_alike(again, stock)
    rx.patch_model(again, stand_in(patched).encoding)
    assert torch.equal(logits(again), logits(patched))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "cpu": lambda: torch.device("cpu"),
    "meta": lambda: torch.device("meta"),
    "empty-weights": init_empty_weights,
    "no-gradients": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default-dtype": lambda: local_torch_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_patching_under_a_context(setup: Setup, patched: PreTrainedModel, context: str) -> None:
    """A context that changes new tensors must change neither the tables nor their sources."""
    model = tiny_model(setup.family)
    with CONTEXTS[context]():
        setup.patch(model)
    assert torch.equal(logits(model), logits(patched))
    assert_same_buffers(model, patched)


def test_the_state_dict_is_the_stock_one(
    setup: Setup, stock: PreTrainedModel, patched: PreTrainedModel
) -> None:
    ours, theirs = patched.state_dict(), stock.state_dict()
    assert list(ours) == list(theirs)
    assert not any("inv_freq" in name for name in ours)
    assert set(dict(patched.named_buffers())) == set(dict(stock.named_buffers()))
    assert list(dict(patched.named_parameters())) == list(dict(stock.named_parameters()))
    # Strictly, both ways, and through torch.save.
    other = setup.patched()
    assert not any(other.load_state_dict(theirs, strict=True))
    assert not any(setup.stock().load_state_dict(ours, strict=True))
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert not any(other.load_state_dict(torch.load(file), strict=True))
    assert torch.equal(logits(other), logits(patched))


def test_meta_init_and_assigned_weights(setup: Setup, patched: PreTrainedModel) -> None:
    """`torch.device("meta")`, a patch, and `load_state_dict(assign=True)`, in this order and in the other."""
    weights = patched.state_dict()
    for patch_first in (True, False):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(setup.family)).eval()
        if patch_first:
            setup.patch(model)
        model.load_state_dict(weights, assign=True)
        if not patch_first:
            setup.patch(model)
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        assert torch.equal(logits(model), logits(patched))


def assert_same_buffers(one: Any, other: Any) -> None:
    for (name, ours), theirs in zip(one.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_buffers_are_those_of_the_stock_module(stock: PreTrainedModel, patched: PreTrainedModel) -> None:
    """In name, shape, dtype, value and persistence, for code that uses them."""
    ours, theirs = stand_in(patched), stock.base_model.rotary_emb
    assert ours._non_persistent_buffers_set == theirs._non_persistent_buffers_set
    assert list(dict(ours.named_buffers())) == list(dict(theirs.named_buffers()))
    for name in ("inv_freq", "original_inv_freq"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-6, atol=0, msg=name)
    assert ours.attention_scaling == pytest.approx(theirs.attention_scaling)
    assert ours.config is patched.config
    assert list(inspect.signature(ours.forward).parameters)[:2] == ["x", "position_ids"]


def test_init_weights_fills_every_buffer_and_changes_nothing_else(
    setup: Setup, patched: PreTrainedModel
) -> None:
    """transformers fills buffers with `_init_weights` when it loads. The values must stay the same."""
    model = setup.patched()
    model._init_weights(stand_in(model))
    assert_same_buffers(model, patched)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(1e9)
    for _ in range(2):
        model._init_weights(stand_in(model))
        assert_same_buffers(model, patched)
        assert torch.equal(logits(model), logits(patched))
    # The whole model: with every weight marked as loaded, as after from_pretrained, none may change.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True
    model.init_weights()
    assert_same_buffers(model, patched)
    assert torch.equal(logits(model), logits(patched))


def test_offloading_by_hooks(setup: Setup, patched: PreTrainedModel, tmp_path: Path) -> None:
    """accelerate moves weights in hooks of each module, and never with `Module.to`."""
    expected = logits(patched)
    offloads: list[Callable[[Any], Any]] = [
        lambda m: cpu_offload(m, execution_device="cpu"),
        lambda m: cpu_offload(m, execution_device="cpu", offload_buffers=True),
        lambda m: disk_offload(m, tmp_path / "plain", execution_device="cpu"),
        lambda m: disk_offload(m, tmp_path / "buffers", execution_device="cpu", offload_buffers=True),
    ]
    for offload in offloads:
        model = setup.patched()
        offload(model)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert torch.equal(logits(model), expected)
        remove_hook_from_submodules(model)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["fire", "learned"])
def test_offloaded_parameters_that_an_encoding_learns(name: str, before: bool, tmp_path: Path) -> None:
    model = llama()
    with rx.extend(llama(), TARGET, name) as patch:
        expected, values = logits(patch.model), patch.learned.state_dict()
    steps = [lambda: rx.extend(model, TARGET, name), lambda: disk_offload(model, tmp_path, "cpu")]
    for step in reversed(steps) if before else steps:
        step()
    assert torch.equal(logits(model), expected)
    write_learned(tmp_path, model)
    read = read_learned(tmp_path)
    assert read.keys() == values.keys()
    assert all(torch.equal(read[key], value) for key, value in values.items())
    if not before:
        with pytest.raises(rx.RopeExtendError, match="accelerate has offloaded"):
            rx.current_patch(model).learn(values, "a file")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start and end without compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


TRACED = [setup for setup in SETUPS if setup.method == "none" or setup.family.model_type == "llama"]
"""Tracing costs seconds, and methods differ only in numbers."""


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("setup", TRACED, ids=str, indirect=True)
def test_compiled_in_one_graph(setup: Setup, stock: PreTrainedModel, patched: PreTrainedModel) -> None:
    compiled = torch.compile(patched, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, logits(stock), **CLOSE)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("setup", TRACED[:1], ids=str, indirect=True)
def test_a_compiled_step_serves_every_position(
    setup: Setup, stock: PreTrainedModel, patched: PreTrainedModel
) -> None:
    """Decoding with a static cache: one graph without breaks, and no new graph for each token."""
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    step = torch.compile(patched.forward, fullgraph=True, backend=backend)
    seen = []
    cache = StaticCache(config=patched.config, max_cache_len=64)
    with torch.no_grad():
        for position in range(12):
            ids, at = IDS[:, position, None], torch.tensor([[position]])
            seen.append(step(ids, position_ids=at, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(seen, dim=1), logits(stock, IDS[:, :12]), **CLOSE)
    assert len(graphs) <= 2, "once for the empty cache, once for the rest"
