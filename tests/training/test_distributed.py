"""Several processes give the results of one: with sequences, weights, or parts of sequences shared.

Real processes over gloo. What needs CUDA is accelerate's own choice of FSDP, which it makes for GPUs alone:
one line tells it that these are some, and all that follows is real.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from cases import tiny_llama
from several_processes import launch
from test_finetune import assert_same, metrics, settings, tokenizer_of, weights
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.record import read_record
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.sharding import Clipping, Sharding

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
    path, plus, checkpoint = argument.partition("+")
    result = finetune(Recipe.from_yaml(path), resume=checkpoint or bool(plus))
    parameters = list(result.model.parameters())
    print("sharded", sum(isinstance(one, DTensor) for one in parameters), "of", len(parameters))
"""


def written(recipe: Recipe, where: Path) -> str:
    path = where / f"{Path(recipe.output_dir).name}.yaml"
    path.write_text(recipe.to_yaml())
    return str(path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the base model, and with the runs in one process that several tests compare with."""
    directory = tmp_path_factory.mktemp("one-process")
    base = tiny_llama(tie_word_embeddings=True)  # so that trained embeddings are a trained head
    base.save_pretrained(directory / "base")
    return directory


@pytest.fixture
def recipe(work: Path, shared: Path, tmp_path: Path, private_cache: None) -> Recipe:
    recipe = Recipe(
        **{**settings(work), "lora_dropout": 0.0, "steps": 4, "save_every": 2, "gradient_accumulation": 4},
        output_dir=str(tmp_path / "one"),
    )
    if not (shared / "base" / "tokenizer.json").exists():
        tokenizer_of(recipe).save_pretrained(shared / "base")
    return replace(recipe, model=str(shared / "base"), eval_data=str(work / "data" / "a.txt"), eval_every=2)


@pytest.fixture
def in_one_process(recipe: Recipe, shared: Path) -> Callable[..., Recipe]:
    """The recipe of a run in this process, which the first test that needs it makes.

    A run that a failure has interrupted is made anew.
    """

    def trained(way: str, **changes: Any) -> Recipe:
        name = "-".join([way, *(f"{field}={value}" for field, value in changes.items())])
        one = replace(recipe, **{**WAYS[way], **changes}, output_dir=str(shared / name))
        done = shared / f"{name}.done"
        if not done.exists():
            finetune(one, overwrite=True)
            done.touch()
        return one

    return trained


def assert_close(ours: Recipe, theirs: Recipe) -> None:
    """Assert equal weights, losses, gradient norms and perplexities, except for the order of sums."""
    mine, others = weights(ours.output_dir), weights(theirs.output_dir)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, others[name], atol=1e-5, rtol=1e-4)
    for line, other in zip(metrics(ours.output_dir), metrics(theirs.output_dir), strict=True):
        assert line.keys() == other.keys()
        for key in line.keys() & {"step", "loss", "grad_norm", "perplexity", "tokens"}:
            assert line[key] == pytest.approx(other[key], rel=1e-4), key


WAYS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all": {"train_norm_embed": True, "gradient_checkpointing": True, "lora_targets": "all-linear"},
    "learned": {"method": "t5_bias", "eval_data": None, "eval_every": 0},
    "bfloat16": {"dtype": "bfloat16"},
}


def in_several(one: Recipe, where: Path, processes: int = 2) -> Recipe:
    """The same run, with the gradients of its steps shared among processes."""
    accumulation = one.gradient_accumulation // processes
    output = str(where / f"{Path(one.output_dir).name}-{processes}")
    return replace(one, gradient_accumulation=accumulation, output_dir=output)


@pytest.mark.slow
def test_data_parallel_trains_as_one_process(in_one_process: Callable[..., Recipe], tmp_path: Path) -> None:
    """DDP: the loss, the norm of the gradient, the weights and the perplexity are those of one process."""
    ones = [in_one_process(way) for way in WAYS]
    twos = [in_several(one, tmp_path) for one in ones]
    paths = [written(two, tmp_path) for two in twos]
    launch(TRAIN, *paths, where=tmp_path, environment={"ACCELERATE_USE_CPU": "true"})
    for one, two in zip(ones, twos, strict=True):
        assert_close(two, one)
        generators = Path(two.output_dir, "checkpoints", "step-4").glob("rng-*")
        assert {path.name for path in generators} == {"rng-0.pt", "rng-1.pt"}


@pytest.mark.slow
def test_sharded_weights_train_as_one_process(in_one_process: Callable[..., Recipe], tmp_path: Path) -> None:
    """FSDP2 in two processes: weights, metrics, record and a resumed run are those of one process."""
    ones = [in_one_process(way) for way in WAYS]
    twos = [in_several(one, tmp_path) for one in ones]
    # Dropout: each process draws its own zeros, and resumes with its own random state.
    whole = replace(twos[1], lora_dropout=0.2, output_dir=str(tmp_path / "whole"))
    again = replace(whole, output_dir=str(tmp_path / "resumed"))
    said = launch(
        AS_IF_GPUS + TRAIN,
        *(written(one, tmp_path) for one in (*twos, whole)),
        f"{written(again, tmp_path)}+{whole.output_dir}/checkpoints/step-2",
        where=tmp_path, environment=FSDP,
    )  # fmt: skip
    lines = [line for line in said.splitlines() if line.startswith("sharded")]
    assert len(lines) == 2 * (len(twos) + 2)
    assert all(line.split()[1] == line.split()[3] for line in lines)
    for one, two in zip(ones, twos, strict=True):
        assert_close(two, one)
        ours, theirs = rx.load(one.output_dir), rx.load(two.output_dir)
        ids = torch.arange(128)[None]
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
        records = [read_record(run.output_dir) for run in (one, two)]
        assert records[0].base_fingerprint == records[1].base_fingerprint is not None
    assert_same(weights(again.output_dir), weights(whole.output_dir))
    assert any(
        not torch.equal(value, weights(twos[1].output_dir)[name])
        for name, value in weights(whole.output_dir).items()
    )


@pytest.mark.slow
def test_sharded_weights_that_one_process_reads_train_as_one_process(
    in_one_process: Callable[..., Recipe], tmp_path: Path
) -> None:
    ones = [in_one_process(way) for way in ("lora", "learned")]
    twos = [in_several(one, tmp_path) for one in ones]
    launch(
        AS_IF_GPUS + TRAIN, *(written(two, tmp_path) for two in twos), where=tmp_path,
        environment={**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
    )  # fmt: skip
    for one, two in zip(ones, twos, strict=True):
        assert_close(two, one)
        assert read_record(one.output_dir).base_fingerprint == read_record(two.output_dir).base_fingerprint


CONTEXT = {**FSDP, "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2], ids=["two processes", "two by two"])
def test_ring_attention_trains_as_one_process(
    in_one_process: Callable[..., Recipe], tmp_path: Path, groups: int
) -> None:
    """Each process has half of each sequence, in one or two groups; results equal those of one process."""
    ones = [in_one_process("lora")]
    if groups == 1:
        ones.append(in_one_process("all", batch_size=2))
    twos = [in_several(one, tmp_path, groups) for one in ones]
    said = launch(
        AS_IF_GPUS + RING_ON_CPU + TRAIN, *(written(one, tmp_path) for one in twos), where=tmp_path,
        environment={**CONTEXT, "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(groups)}, processes=2 * groups,
    )  # fmt: skip
    # Every attention of a training step, two layers in each process, was over half of a sequence; the run
    # with gradient checkpointing computes each a second time, in the backward pass.
    calls = ones[0].steps * ones[0].gradient_accumulation * 2 * 2 * (3 if groups == 1 else 1)
    found = re.findall(r"ring (\d+) (\d+)", said)
    assert [length for length, _ in found] == ["64"] * 2 * groups
    assert sum(int(count) for _, count in found) == calls
    for one, two in zip(ones, twos, strict=True):
        assert_close(two, one)


ULYSSES = {
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0", "DS_ACCELERATOR": "cpu",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",  # as accelerate launch sets it; the recipe overrides it
}  # fmt: skip

NOTE_LENGTHS = """
import atexit
from rope_extend.training.sharding import Objective
seen, forward = [], Objective.forward
def noted(self, *args, **inputs):
    seen.append(inputs["input_ids"].shape[1])
    return forward(self, *args, **inputs)
Objective.forward = noted
atexit.register(lambda: print("read", *set(seen), len(seen)))
"""


@pytest.mark.slow
def test_ulysses_in_two_groups_trains_as_one_process(
    in_one_process: Callable[..., Recipe], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    one = in_one_process("lora")
    two = in_several(one, tmp_path)
    launch(
        AS_IF_GPUS + TRAIN, written(two, tmp_path), where=tmp_path, processes=4,
        environment={**ULYSSES, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
    )  # fmt: skip
    assert_close(two, one)


@pytest.mark.slow
def test_ulysses_trains_as_one_process(in_one_process: Callable[..., Recipe], tmp_path: Path) -> None:
    """With DeepSpeed's accelerator for CPUs; also if the run is interrupted."""
    pytest.importorskip("deepspeed")
    ones = [in_one_process("lora"), in_one_process("all", batch_size=2)]
    twos = [in_several(one, tmp_path, processes=1) for one in ones]
    half = replace(twos[0], steps=2, output_dir=str(tmp_path / "half"))
    again = replace(twos[0], output_dir=half.output_dir)
    (tmp_path / "again.yaml").write_text(again.to_yaml())
    for run in (*(written(one, tmp_path) for one in (*twos, half)), f"{tmp_path / 'again.yaml'}+"):
        # One run in each process: DeepSpeed makes its groups once.
        said = launch(AS_IF_GPUS + NOTE_LENGTHS + TRAIN, run, where=tmp_path, environment=ULYSSES)
        assert [length for length, _ in re.findall(r"read (\d+) (\d+)", said)] == ["64"] * 2
    for one, two in zip(ones, twos, strict=True):
        assert_close(two, one)
    assert_same(weights(again.output_dir), weights(twos[0].output_dir))


PARTS = """
import torch
import torch.distributed as dist
from cases import TRAINED, tiny_llama
import rope_extend as rx
from rope_extend.training.sharding import Sharding

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
sharding = Sharding(ulysses=size, ranks=size, rank=rank)
ids = torch.arange(4 * TRAINED).remainder(61).repeat(2, 1)
for method in ("linear", "yarn", "ntk", "llama3", "abf"):
    model = tiny_llama()
    with rx.extend(model, 4 * TRAINED, method), torch.no_grad():
        rotary, states = model.model.rotary_emb, torch.zeros(2, 4 * TRAINED, 1)
        full = rotary(states, torch.arange(4 * TRAINED)[None])
        with sharding.cut(None, {"input_ids": ids, "labels": ids}) as part:
            assert part["input_ids"].shape == (2, 4 * TRAINED // size)
            ours = rotary(states[:, : 4 * TRAINED // size], part["position_ids"][:1])
        for mine, all_rows in zip(ours, full):
            halves = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(halves, mine.contiguous())
            assert torch.equal(torch.cat(halves, 1), all_rows), method
            assert not torch.equal(halves[1], all_rows[:, : mine.shape[1]]), method
        # and the targets of the whole sequence, whose last token predicts nothing
        targets = [torch.empty_like(part["shift_labels"]) for _ in range(size)]
        dist.all_gather(targets, part["shift_labels"])
        assert torch.equal(torch.cat(targets, 1), torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100))
        assert part["num_items_in_batch"] * size == 2 * (4 * TRAINED - 1)
dist.destroy_process_group()  # a thread of gloo that still runs at exit would abort the process
print("done")
"""


@pytest.mark.slow
def test_parts_have_the_positions_of_the_whole(tmp_path: Path) -> None:
    """Two processes have half of a text each: joined, their tables and targets are those of the text."""
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, str(Path(tests).parent)])
    assert launch(PARTS, where=tmp_path, environment={"PYTHONPATH": path}).count("done") == 2


CUT = [Sharding(weights=True, context=2, ranks=2), Sharding(ulysses=2, ranks=2)]
REASONS = {
    "dynamic_ntk": "its table depends on the length of the text",
    "dynamic_yarn": "its table depends on the length of the text",
    "dynamic_linear": "its table depends on the length of the text",
    "logn(yarn)": "scales attention by the number of visible tokens",
    "xpos": "rotates or scales inside attention",
    "alibi": "acts inside attention or on embeddings",
    "t5_bias": "acts inside attention or on embeddings",
    "linear_attention": "acts inside attention or on embeddings",
    "sinusoidal": "acts inside attention or on embeddings",
}


@pytest.mark.parametrize("sharding", CUT, ids=["context", "ulysses"])
@pytest.mark.parametrize("method", REASONS)
def test_encodings_that_need_the_whole_text_are_refused_before_weights_are_loaded(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, sharding: Sharding, method: str
) -> None:
    def loading(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    monkeypatch.setattr(Sharding, "of", lambda _: sharding)
    with pytest.raises(
        RopeExtendError, match=rf"parts of a sequence \([cs]p_size 2\).*{REASONS[method]}.*yarn"
    ):
        finetune(replace(recipe, method=method))
    assert not Path(recipe.output_dir).exists()


def check(sharding: Sharding, method: str, model: Any = None, **changes: Any) -> None:
    model = model or tiny_llama()
    with rx.extend(model, 128, method) as patch:
        sharding.check(patch, model, **{"length": 128, "sampled": False, **changes})


@pytest.mark.parametrize("sharding", CUT, ids=["context", "ulysses"])
def test_rotary_methods_with_one_table_pass(sharding: Sharding) -> None:
    for method in ("linear", "ntk", "yarn", "llama3", "clipped", "nope", "resonance(yarn)"):
        check(sharding, method)


def test_other_settings_that_cannot_be_cut_are_refused() -> None:
    context, ulysses = CUT
    for sharding in CUT:
        with pytest.raises(RopeExtendError, match=r"short blocks stand for long ones.*p_size 2 or positions"):
            check(sharding, "yarn", sampled=True)
    with pytest.raises(RopeExtendError, match=r"126 tokens cannot be cut into 4 .*such as 124"):
        check(context, "yarn", length=126)
    check(ulysses, "yarn", length=126)
    with pytest.raises(RopeExtendError, match="127 tokens cannot be cut into 2"):
        check(ulysses, "yarn", length=127)
    eager = tiny_llama()
    eager.set_attn_implementation("eager")
    with pytest.raises(RopeExtendError, match=r"replaces sdpa.*eager"):
        check(context, "yarn", eager)
    sliding = MistralForCausalLM(
        MistralConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            num_key_value_heads=1, sliding_window=16, max_position_embeddings=32,
        )
    )  # fmt: skip
    with pytest.raises(RopeExtendError, match="layers of type sliding_attention"):
        check(context, "yarn", sliding)
    with pytest.raises(RopeExtendError, match="layers of type sliding_attention"):
        check(ulysses, "yarn", sliding)
    with pytest.raises(RopeExtendError, match=r"2 heads with 1 key-value heads are not .* sp_size 4"):
        check(Sharding(ulysses=4, ranks=4), "yarn")
    once = Sharding(weights=True, loaded_once=True, ranks=2)
    check(once, "yarn")
    with pytest.raises(RopeExtendError, match=r"train_norm_embed .*ram_efficient_loading"):
        check(once, "yarn", trains_base=True)


SIZES = ("cp_size", "sp_size", "tp_size", "dp_replicate_size", "dp_shard_size")


def accelerator(kind: str = "NO", *, fsdp2: bool = False, stage: int = 0, **sizes: int) -> Any:
    config = SimpleNamespace(**(dict.fromkeys(SIZES, 1) | sizes)) if sizes else None
    state = SimpleNamespace(
        fsdp_plugin=SimpleNamespace(cpu_ram_efficient_loading=False),
        deepspeed_plugin=SimpleNamespace(zero_stage=stage),
    )
    return SimpleNamespace(
        distributed_type=DistributedType(kind), parallelism_config=config, is_fsdp2=fsdp2, num_processes=4,
        process_index=3, state=state,
    )  # fmt: skip


def test_sharding_follows_the_configuration_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sharding.of(accelerator())
    assert (one.parts, one.replicas, one.replica) == (1, 4, 3)
    two = Sharding.of(accelerator("FSDP", fsdp2=True, cp_size=2))
    assert (two.weights, two.context, two.parts, two.replicas, two.replica) == (True, 2, 2, 2, 1)
    four = Sharding.of(accelerator("DEEPSPEED", sp_size=4))
    assert (four.weights, four.ulysses, four.parts, four.replicas, four.replica) == (False, 4, 4, 1, 0)
    for wrong, message in (
        (accelerator("MULTI_GPU", cp_size=2), "cp_size needs FSDP2"),
        (accelerator("MULTI_GPU", sp_size=2), "sp_size needs DeepSpeed"),
        (accelerator("MULTI_GPU", tp_size=2), "tensor parallelism"),
        (accelerator("DEEPSPEED", stage=3, sp_size=2), "zero_stage: 0"),
        (accelerator("DEEPSPEED", sp_size=2), r"dp_replicate_size 1 times sp_size 2 is not .* 4;"),
        (accelerator("DEEPSPEED"), "DeepSpeed is supported only for sequences"),
        (accelerator("MEGATRON_LM"), "does not support MEGATRON_LM"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            Sharding.of(wrong)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RopeExtendError, match="FSDP is configured, but accelerate runs without it"):
        Sharding.of(accelerator("MULTI_CPU"))
    with pytest.raises(RopeExtendError, match="fsdp_version: 2"):
        Sharding.of(accelerator("FSDP"))


def test_a_run_resumes_only_with_the_same_parts(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune(replace(recipe, steps=2))
    monkeypatch.setattr(Sharding, "of", lambda _: Sharding(ulysses=2))
    with pytest.raises(RopeExtendError, match=r"in 1 parts, and this run has 2.*same cp_size"):
        finetune(recipe, resume=True)


def test_clipping_in_the_optimizer_equals_that_of_the_loop() -> None:
    """Compared with torch's clipping; a gradient that is not finite changes nothing."""
    ours, theirs = (torch.nn.Parameter(torch.arange(4.0)) for _ in range(2))
    one, two = (torch.optim.AdamW([parameter], lr=0.1) for parameter in (ours, theirs))
    clipping = Clipping(one, 0.5)
    for scale in (1.0, 100.0, math.nan, math.inf, 3.0):
        ours.grad, theirs.grad = (torch.tensor([1.0, 2, -3, 4]) * scale for _ in range(2))
        one.step()
        norm = float(torch.nn.utils.clip_grad_norm_([theirs], 0.5))
        if math.isfinite(norm):
            two.step()
            assert clipping.norm == norm
        else:
            assert not math.isfinite(clipping.norm)
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()
