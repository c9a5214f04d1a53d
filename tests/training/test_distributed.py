"""Several processes give the results of one: with sequences, weights, or parts of sequences shared.

Real processes over gloo. What needs CUDA is accelerate's own choice of FSDP, which it makes for GPUs alone:
one line tells it that these are some, and all that follows is real.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from cases import tiny_llama, tiny_model
from runs import assert_same, described, metrics, saved, settings, weights
from safetensors.torch import load_file
from several_processes import launch
from transformers import PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.record import read_record
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.sharding import Sharding

FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip

AS_IF_GPUS = """
import os
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
"""

RING_ON_CPU = """
import atexit
seen = []
atexit.register(lambda: print("ring", *set(seen), len(seen)))
# Torch's ring attention supports the kernels of GPUs only; here the CPU's kernel is registered for it.
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

def plain(values):
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]

def spread(values, mesh):
    return tuple(DTensor.from_local(value, mesh, [Shard(2)], run_check=False) for value in values)

def forward(_, args, kwargs):
    mesh, (query, key, value, dropout, causal) = args[0].device_mesh, (plain(args) + [0.0, False])[:5]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen.append(query.shape[2])
    found = ring._templated_ring_attention(
        mesh.get_group(), 2, kernel, query, key, value, causal, dropout_p=dropout, scale=kwargs.get("scale")
    )
    return spread(found, mesh)

def backward(_, args, kwargs):
    mesh, (grad, query, key, value, out, sums, dropout, causal) = args[1].device_mesh, plain(args)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = ring._templated_ring_attention_backward(
        mesh.get_group(), 2, kernel, grad, "grad_out", query, key, value, out, sums, causal,
        dropout_p=dropout, scale=kwargs.get("scale"),
    )
    return spread(found, mesh)

ring.custom_ops[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default] = forward
ring.custom_ops[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = backward
"""

TRAIN = """
import sys
from torch.distributed.tensor import DTensor
from rope_extend.training.finetune import Recipe, finetune
for argument in sys.argv[1:]:
    result = finetune(Recipe.from_yaml(argument), resume=True)
    parameters = list(result.model.parameters())
    print("sharded", sum(isinstance(one, DTensor) for one in parameters), "of", len(parameters))
"""


def written(recipe: Recipe, where: Path) -> str:
    path = where / f"{Path(recipe.output_dir).name}.yaml"
    path.write_text(recipe.to_yaml())
    return str(path)


@pytest.fixture(scope="module")
def shared(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the base model, and with the runs in one process that several tests compare with."""
    directory = tmp_path_factory.mktemp("one-process")
    PreTrainedTokenizerFast.from_pretrained(work / "model").save_pretrained(directory / "base")
    base = tiny_llama(tie_word_embeddings=True)  # so that trained embeddings are a trained head
    base.save_pretrained(directory / "base")
    return directory


@pytest.fixture
def recipe(work: Path, shared: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(**settings(work) | {
        "lora_dropout": 0.0, "steps": 4, "save_every": 2, "gradient_accumulation": 4, "eval_every": 2,
        "model": str(shared / "base"), "eval_data": str(work / "data" / "a.txt"),
        "output_dir": str(tmp_path / "one"),
    })  # fmt: skip


@pytest.fixture
def in_one_process(recipe: Recipe, shared: Path) -> Callable[..., Recipe]:
    """The recipe of a run in this process, which the first test that needs it makes.

    A run that a failure has interrupted is made anew.
    """

    def run(way: str, **changes: Any) -> Recipe:
        name = "-".join([way, *(f"{field}={value}" for field, value in changes.items())])
        fields = {**WAYS[way], **changes}
        one = replace(recipe, **fields, output_dir=str(shared / name))
        if not any((shared / name).glob("*model.safetensors")):
            finetune(one, overwrite=True)
        return one

    return run


def trained(run: Recipe, part: str = "") -> dict[str, torch.Tensor]:
    """All weights of a run, or of one of its checkpoints, also those that its encoding has learned."""
    files = sorted(Path(run.output_dir, part).glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_close(ours: Recipe, theirs: Recipe) -> None:
    """Assert equal weights, losses, gradient norms and perplexities, except for the order of sums."""
    mine, others = trained(ours), trained(theirs)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, others[name], atol=1e-5, rtol=1e-4)
    for line, other in zip(metrics(ours.output_dir), metrics(theirs.output_dir), strict=True):
        assert line.keys() == other.keys()
        for key in line.keys() & {"step", "loss", "grad_norm", "perplexity", "tokens"}:
            assert line[key] == pytest.approx(other[key], rel=1e-4), key


WAYS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all": {
        "train_norm_embed": True, "gradient_checkpointing": True, "lora_targets": "all-linear",
        "batch_size": 2,
    },
    "learned": {"method": "t5_bias", "eval_data": None, "eval_every": 0},
    "bfloat16": {"dtype": "bfloat16"},
    "packed": {"packing": "restart"},
    "full": {"lora_targets": "none", "method": "t5_bias", "train_norm_embed": False},
}  # fmt: skip


CONTEXT = {**FSDP, "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
ON_CPUS = {"ACCELERATE_USE_CPU": "true"}
READ_ONCE = {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
RINGS = AS_IF_GPUS + RING_ON_CPU
ROUNDED_ALIKE = [way for way in WAYS if way != "bfloat16"]  # which rounds sums of parts of a window otherwise
LAUNCHES: dict[str, tuple[dict[str, str], str, list[str], int, dict[str, Any]]] = {
    "data parallel": (ON_CPUS, "", [*WAYS], 1, {}),
    "a split window": (ON_CPUS, "", ROUNDED_ALIKE, 2, {"split_window": 2}),
    "spread weights and a split window": (FSDP, AS_IF_GPUS, ["all", "full"], 2, {"split_window": 2}),
    "spread weights": (FSDP, AS_IF_GPUS, [*WAYS], 1, {}),
    "spread weights that one process reads": (READ_ONCE, AS_IF_GPUS, ["lora", "learned"], 1, {}),
    "a ring": ({**CONTEXT, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}, RINGS, ["lora", "all"], 2, {}),
    "two rings": ({**CONTEXT, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, RINGS, ["lora"], 2, {}),
}
"""Environment, start of the script, ways to train, processes that share a window, and changed fields."""


def in_several(one: Recipe, where: Path, groups: int = 2, **changes: Any) -> Recipe:
    """The same run, with the sequences of its steps shared among groups of processes."""
    accumulation, name = one.gradient_accumulation // groups, f"{Path(one.output_dir).name} again"
    return replace(one, gradient_accumulation=accumulation, output_dir=str(where / name), **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_several_processes_train_as_one(
    name: str, in_one_process: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The loss, the norm of the gradient, the weights and the perplexity are those of one process."""
    environment, start, ways, parts, changes = LAUNCHES[name]
    processes = 4 if name == "two rings" else 2
    ones = [in_one_process(way) for way in ways]
    others = [in_several(one, tmp_path, processes // parts, **changes) for one in ones]
    paths = [written(other, tmp_path) for other in others]
    said = launch(start + TRAIN, *paths, where=tmp_path, environment=environment, processes=processes)
    for one, other in zip(ones, others, strict=True):
        assert_close(other, one)
        assert read_record(one.output_dir).base_fingerprint == read_record(other.output_dir).base_fingerprint
        states = {path.name for path in saved(other, 4).glob("rng_state*")}
        assert states == {f"rng_state_{rank}.pth" for rank in range(processes)}
        if environment is FSDP:
            assert re.search(r"sharded (\d+) of \1\n", said)
            assert not re.search(r"sharded (\d+) of (?!\1\n)", said)
        if environment is READ_ONCE:
            assert_same(trained(other, "checkpoints/checkpoint-4"), trained(other))
    if start == RINGS:
        # Every attention of a training step, two layers in each process, was over half of a sequence; the
        # run with gradient checkpointing computes each a second time, in the backward pass.
        calls = ones[0].steps * ones[0].gradient_accumulation * 2 * 2 * (3 if "all" in ways else 1)
        found = re.findall(r"ring (\d+) (\d+)", said)
        assert [length for length, _ in found] == ["64"] * processes
        assert sum(int(count) for _, count in found) == calls


@pytest.mark.slow
def test_each_process_draws_its_own_dropout_and_resumes_with_its_random_state(
    recipe: Recipe, tmp_path: Path
) -> None:
    runs = [
        in_several(replace(recipe, lora_dropout=dropout), tmp_path / str(dropout)) for dropout in (0, 0.2)
    ]
    again = replace(runs[1], output_dir=str(tmp_path / "resumed"))
    for directory in ("0", "0.2", "half"):
        (tmp_path / directory).mkdir()
    paths = [written(run, Path(run.output_dir).parent) for run in runs]
    paths += [written(replace(again, steps=2), tmp_path / "half"), written(again, tmp_path)]
    launch(AS_IF_GPUS + TRAIN, *paths, where=tmp_path, environment=FSDP)
    plain, whole, resumed = (weights(run.output_dir) for run in (*runs, again))
    assert_same(resumed, whole)
    assert any(not torch.equal(value, plain[name]) for name, value in whole.items())


ANY_TRAINER = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
import rope_extend as rx

rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(8 * 12).view(8, 12) % 60]

def train(kind, output, steps, **resume):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    rx.patch_model(model, rx.encoding("t5_bias"), target_length=256)
    settings = TrainingArguments(
        output, max_steps=steps, save_steps=2, report_to=[], learning_rate=1e-2, lr_scheduler_type="constant"
    )
    callbacks = [rx.SaveEncodingCallback()] if kind is Trainer else []
    kind(model, settings, train_dataset=rows, callbacks=callbacks).train(**resume)
    return {name: value.full_tensor() for name, value in model.named_parameters() if value.requires_grad}

for kind in (Trainer, rx.RopeTrainer):
    whole = train(kind, f"{sys.argv[2]}/whole {kind.__name__}", 4)
    again = f"{sys.argv[2]}/again {kind.__name__}"
    train(kind, again, 2)
    resumed = train(kind, again, 4, resume_from_checkpoint=True)
    assert any("rope_extend_learned" in name for name in whole)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items()), kind
    try:
        rx.load(f"{again}/checkpoint-4")
    except rx.RopeExtendError as error:
        assert "weights in shards (pytorch_model_fsdp_0) that only a resumed run reads" in str(error)
    else:
        raise AssertionError("shards were loaded")

os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
train(rx.RopeTrainer, f"{sys.argv[2]}/full", 2)
assert rx.current_patch(rx.load(f"{sys.argv[2]}/full/checkpoint-2")).encoding.name == "t5_bias"
"""


@pytest.mark.slow
def test_a_run_of_any_trainer_resumes_from_shards_with_what_its_encoding_learned(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Trainer saves shards of an adapter without it. Whole weights can be loaded, and shards are named so."""
    launch(AS_IF_GPUS + ANY_TRAINER, recipe.model, str(tmp_path), where=tmp_path, environment=FSDP)


CUT = Sharding(weights=True, parts=2, ranks=2)


@pytest.mark.usefixtures("no_weights")
def test_what_cannot_be_cut_is_refused_before_weights_are_loaded(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharding, "of", lambda *_: CUT)
    with pytest.raises(RopeExtendError, match=r"cp_size 2\).*acts inside attention"):
        finetune(replace(recipe, method="alibi"))
    assert not Path(recipe.output_dir).exists()


def check(sharding: Sharding, method: str, model: Any = None, **changes: Any) -> None:
    model = model or tiny_llama()
    with rx.extend(model, 128, method) as patch:
        sharding.check(patch, model, described(**changes))


def test_only_rotary_methods_with_one_table_can_be_cut() -> None:
    for method in ("linear", "yarn", "clipped", "nope", "resonance(yarn)", "logn(yarn)"):
        check(CUT, method)
    for method in ("dynamic_ntk", "xpos", "linear_attention", "sinusoidal"):
        with pytest.raises(RopeExtendError, match=rf"cp_size 2\).*{method}.*split_window"):
            check(CUT, method)


def test_other_settings_that_cannot_be_cut_are_refused() -> None:
    eager = tiny_llama()
    eager.set_attn_implementation("eager")
    for model, changes, reason in (
        (None, {"positions": "pose", "block_length": 32}, "sampled positions need whole sequences"),
        (None, {"packing": "restart"}, "packed documents and"),
        (None, {"block_length": 126}, "126 tokens cannot be cut into 4 equal pieces"),
        (eager, {}, "replaces sdpa, but this model uses eager"),
        (tiny_model("mistral"), {}, "layers of type sliding_attention"),
    ):
        with pytest.raises(RopeExtendError, match=rf"cp_size 2\).*{reason}.*split_window 2 instead"):
            check(CUT, "yarn", model, **changes)
    with pytest.raises(RopeExtendError, match=r"cp_size 2\).*packed.*Nor does split_window: .* 1 heads"):
        check(CUT, "yarn", tiny_llama(num_attention_heads=1), packing="restart")
    once = Sharding(weights=True, loaded_once=True, ranks=2)
    check(once, "yarn")
    with pytest.raises(RopeExtendError, match=r"train_norm_embed .*ram_efficient_loading"):
        check(once, "yarn", train_norm_embed=True)


def accelerator(kind: str = "NO", *, fsdp2: bool = False, **sizes: int) -> Any:
    config = SimpleNamespace(**({"cp_size": 1, "tp_size": 1} | sizes)) if sizes else None
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_ram_efficient_loading=False))
    return SimpleNamespace(
        distributed_type=DistributedType(kind), parallelism_config=config, is_fsdp2=fsdp2, num_processes=4,
        process_index=3, state=state,
    )  # fmt: skip


def test_sharding_follows_the_configuration_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sharding.of(accelerator())
    assert (one.parts, one.replicas) == (1, 4)
    two = Sharding.of(accelerator("FSDP", fsdp2=True, cp_size=2))
    assert (two.weights, two.parts, two.replicas) == (True, 2, 2)
    for wrong, message in (
        (accelerator("MULTI_GPU", cp_size=2), "cp_size needs FSDP2"),
        (accelerator("MULTI_GPU", tp_size=2), "tensor parallelism"),
        (accelerator("DEEPSPEED"), "does not support DEEPSPEED; use DDP or FSDP2"),
        (accelerator("MEGATRON_LM"), "does not support MEGATRON_LM"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            Sharding.of(wrong)
    with pytest.raises(RopeExtendError, match="split_window 2 and cp_size 2 both share sequences; leave one"):
        Sharding.of(accelerator("FSDP", fsdp2=True, cp_size=2), 2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for kind in ("MULTI_CPU", "FSDP"):  # without GPUs, and in version 1
        with pytest.raises(RopeExtendError, match=rf"as FSDP2 \({kind}\); set fsdp_version: 2, and launch"):
            Sharding.of(accelerator(kind))
