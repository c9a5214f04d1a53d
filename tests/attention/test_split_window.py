"""Several processes that share a window compute what one process computes: real processes over gloo."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from alternative_cases import ALTERNATIVES
from cases import ALL_FAMILIES, tiny_model
from peft import LoraConfig, get_peft_model
from rotary_cases import ENCODINGS, TARGET, TRAINED
from several_processes import launch
from test_forward_plan import CPU, SHAPES, measured
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_extend as rx
from rope_extend import PatchError, RopeExtendError
from rope_extend.attention import foreign_splits
from rope_extend.attention.split_window import check_split
from rope_extend.cli.main import main as command
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.evaluation.forward_plan import plan_forward
from rope_extend.loss import shifted

TOKENS = 85  # which neither two nor four processes can share equally
IDS = torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(1))
PACKED = torch.cat([torch.arange(37), torch.arange(TOKENS - 37)])[None]
SAMPLED = torch.cat([torch.arange(37), torch.arange(90, 90 + TOKENS - 37)])[None]
SETTINGS = ("plain", "packed", "one key head", "LoRA", "checkpointing")
ROWS = [*ENCODINGS, *ALTERNATIVES]
IN_FLOAT32 = ("fire", "shaw", "linear_attention", "learned", "kerple", "t5_bias")
"""Encodings that learn numbers, or add up, in float32 in every model."""


def llama(method: Any, setting: str = "plain") -> Any:
    """A float64 model under a method, a row of the tables or a name."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=1 if setting == "one key head" else 2, max_position_embeddings=TRAINED,
            initializer_range=0.3,
        )
    ).double()  # fmt: skip
    if isinstance(method, str):
        rx.extend(model, TARGET, method)
    else:
        shape = (rx.RopeShape(8, 1e4, TRAINED),) if hasattr(method, "oracle") else ()
        rx.patch_model(model, method.build(*shape), target_length=TARGET)
    if setting == "LoRA":
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, lora).double()
    if setting == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def step(model: Any, ids: torch.Tensor = IDS, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss of a batch and all gradients, averaged over the processes as data parallel training does."""
    model.zero_grad(set_to_none=True)
    output = model(input_ids=ids, use_cache=False, **given)
    if output.loss is None:
        output.loss = cross_entropy(output.logits.flatten(0, 1), shifted(ids).flatten())
    output.loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    for gradient in found.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return {**found, "loss": output.loss.detach()}


def error_of(model: Any, tolerance: float = 1e-12, **given: torch.Tensor) -> str:
    """What differs between one process and several that share the window."""
    one = step(model, **given)
    with rx.split_window(model):
        several = step(model, **given)
    largest = max(float(value.abs().max()) for value in one.values())
    assert several.keys() == one.keys()
    errors = {name: float((several[name] - value).abs().max()) / largest for name, value in one.items()}
    worst = max(errors, key=lambda name: errors[name])
    return f"{worst} {errors[worst]:.1e}" if errors[worst] > tolerance else ""


def methods(rows: list[Any], few: bool) -> None:
    """Loss and gradients of rows: of few the first of each method, with one setting each."""
    wrong, seen = [], set()
    for row in rows:
        if few and row.name in seen:
            continue
        seen.add(row.name)
        for setting in [SETTINGS[len(seen) % 5]] if few else SETTINGS:
            if (row.name, setting) == ("linear_attention", "packed"):
                continue  # which it refuses in one process too
            given = {"position_ids": PACKED} if setting == "packed" else {}
            tolerance = 1e-6 if row.name in IN_FLOAT32 else 1e-12
            if error := error_of(llama(row, setting), tolerance, **given):
                wrong.append(f"{row}, {setting}: {error}")
    assert not wrong, "\n".join(wrong)


@contextmanager
def counted() -> Any:
    """Counts the messages of each kind, by their numbers of axes."""
    calls, originals = Counter[str](), (dist.all_to_all_single, dist.all_gather)

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Any, given: torch.Tensor, **options: Any) -> Any:
            calls[f"{name} {given.dim()}"] += 1
            return original(out, given, **options)

        return call

    dist.all_to_all_single, dist.all_gather = noted("exchange", originals[0]), noted("gather", originals[1])
    try:
        yield calls
    finally:
        dist.all_to_all_single, dist.all_gather = originals


def inputs() -> None:
    """Other inputs, what is sent, and what is left alone."""
    model = llama("dynamic_yarn")
    before = model(IDS, use_cache=False).logits
    assert not error_of(model, position_ids=SAMPLED)
    rows = {"ids": IDS.repeat(2, 1), "attention_mask": torch.ones(2, TOKENS, dtype=torch.int64)}
    rows["attention_mask"][1, :11] = 0
    assert not error_of(model, **rows)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    assert not error_of(llama("yarn"), position_ids=PACKED, attention_mask=mask)
    as_trainer = {"labels": IDS.roll(1), "num_items_in_batch": torch.tensor(70)}
    assert not error_of(model, 1e-6, **as_trainer)
    with rx.chunked_loss(model):
        assert not error_of(model, 1e-6, labels=IDS, position_ids=PACKED)
        assert not error_of(model, 1e-6, **as_trainer)
    with rx.split_window(model) as split:
        with counted() as calls, torch.no_grad():
            after = model(IDS).logits
        # Of each layer queries, keys, values and outputs; of all layers once the positions, to compare them.
        assert calls == {"exchange 5": 4 * 2, "gather 2": 1, "gather 3": 1}
        texts = model.generate(IDS[:, :40], max_new_tokens=5, do_sample=False)
        assert torch.equal(deepcopy(model)(IDS).logits, after)
        with pytest.raises(RopeExtendError, match="split already"):
            rx.split_window(model)
        other = IDS + dist.get_rank() % 2
        for loss, name in (
            (nullcontext, "input_ids"), (nullcontext, "labels"), (rx.chunked_loss, "labels"),
            (rx.chunked_loss, "shift_labels"),
        ):  # fmt: skip
            wrong = pytest.raises(RopeExtendError, match=r"got different batches.*split\.same_batches")
            with loss(model), wrong:
                model(**{"input_ids": IDS, name: other})
        for name in ("output_hidden_states", "_output_attentions"):  # as config.output_attentions is stored
            refused = pytest.raises(PatchError, match=f"{name.removeprefix('_')} cannot be shared")
            for asked in ({name.removeprefix("_"): True}, {}):
                with refused:
                    model(IDS, **asked)
                vars(model.config)[name] = True
            vars(model.config)[name] = False
        with pytest.raises(RopeExtendError, match=r"accelerate found 1, so.*ACCELERATE_USE_CPU=true"):
            split.same_batches(Accelerator())  # which connects no processes on a CPU by itself
        with rx.patch_model(model, rx.encoding("none")), pytest.raises(PatchError, match="patched after"):
            model(IDS)
    assert torch.equal(texts, model.generate(IDS[:, :40], max_new_tokens=5, do_sample=False))
    assert float((after - before).abs().max()) <= 1e-12 * float(before.abs().max())
    assert torch.equal(model(IDS, use_cache=False).logits, before)
    # Positions that each process counts for itself give another result, so the checks above can fail.
    share = -(-TOKENS // dist.get_world_size())
    local = (torch.arange(TOKENS) % share)[None]
    wrong = model(IDS, position_ids=local, attention_mask=mask).logits
    assert float((wrong - before).abs().max()) > 1e-3


def families(names: str) -> None:
    """Masks by layer type, sliding windows, chunks, sinks of heads, latent keys: logits of one process."""
    for case in ALL_FAMILIES:
        if names and case.model_type not in names.split():
            continue
        model = tiny_model(case)
        rx.extend(model, TARGET, "yarn")
        try:
            split = rx.split_window(model)
        except rx.UnsupportedModelError:
            continue
        ids = IDS.repeat(2, 1).clamp(min=3, max=59)
        with torch.no_grad():
            with split:
                several = model(ids).logits
            one = model(ids, use_cache=False).logits
        assert float((several - one).abs().max()) <= 1e-5 * float(one.abs().max()), case


def perplexities() -> None:
    """Every target's loss, of whole windows and in chunks, with a share of the heads in the cache."""
    documents = [IDS[0].repeat(3), IDS[0].flip(0).repeat(3)]
    for method in ("dynamic_yarn", "self_extend", "alibi"):
        model = llama(method, "one key head")
        for chunk in (None, 50):
            how = {"save_losses": True, "progress": False, "options": rx.RunOptions(chunk)}
            for asked in (
                {"lengths": [64, 203]},
                {"lengths": [90], "protocol": "sliding", "stride": 32},
                {"lengths": [90], "protocol": "last-k", "last": 20},
            ):
                one = rx.perplexity(model, documents, **asked, **how).losses
                with rx.split_window(model):
                    several = rx.perplexity(model, documents, **asked, **how).losses
                for length, losses in one.items():
                    for expected, found in zip(losses, several[length], strict=True):
                        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0, err_msg=method)


def plans() -> None:
    """The bytes of a process in an evaluation are estimated in one, to 2 %."""
    for chunk in (None, 192):
        with TemporaryDirectory() as directory:
            SHAPES["llama"].save_pretrained(directory)
            options = replace(CPU, split_window=dist.get_world_size())
            plan = plan_forward(directory, [768], load_options=options, chunk=chunk)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPES["llama"]).eval()
        with rx.split_window(model):
            assert plan.longest.total == pytest.approx(measured(model, 768, chunk), rel=0.02)


def sharded_weights() -> None:
    """With the weights spread by FSDP2, which averages gradients as data parallel training does."""
    for setting in ("checkpointing", "LoRA"):
        model = llama("dynamic_yarn", setting)
        expected = step(model, position_ids=PACKED)
        with rx.split_window(model):
            for layer in model.get_base_model().model.layers if setting == "LoRA" else model.model.layers:
                fully_shard(layer)
            fully_shard(model).zero_grad(set_to_none=True)
            logits = model(input_ids=IDS, position_ids=PACKED, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), shifted(IDS).flatten())
            loss.backward()
        named = model.named_parameters()
        found = {name: each.grad.full_tensor() for name, each in named if each.grad is not None}
        assert {*found, "loss"} == expected.keys()
        for name, value in {**found, "loss": loss}.items():
            assert float((value - expected[name]).abs().max()) <= 1e-12, name


def other_libraries() -> None:
    """Ring attention of torch: refused, in every process, where it would leak or wait for ever."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    length = 2 * dist.get_world_size() * 8
    for method, positions, reason in (
        ("dynamic_yarn", torch.arange(length), "does not work: dynamic_yarn"),
        ("self_extend", torch.arange(length), "does not work: self_extend.*split_window"),
        ("alibi", torch.arange(length), "does not work: alibi"),
        ("yarn", torch.arange(length) % (length - 3), "hold up to 2.*split_window"),
    ):
        buffers = [IDS[:, :length].clone(), positions[None].clone()]
        model = llama(method)
        with (
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)),
            pytest.raises(PatchError, match=reason),
        ):
            model(buffers[0], position_ids=buffers[1])
    buffers = [IDS[:, :length].clone(), torch.arange(length)[None]]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]):
        assert foreign_splits.ring_mesh() is mesh
        foreign_splits.check_foreign_split(llama("logn(yarn)").model, (), {"position_ids": buffers[1]})
    assert foreign_splits.ring_mesh() is None


def run(which: str) -> None:
    """In each process: some of the checks above."""
    dist.init_process_group("gloo")
    if which == "families":
        families("")
    elif which == "some":
        methods(ROWS, few=True)
        families("mistral gemma3_text gpt_oss deepseek_v3 gpt_neox qwen2_vl")
    else:
        methods(ROWS[int(which) :: 3], few=False)
    if which in "some 0":
        inputs()
        perplexities()
        plans()
        sharded_weights()
        other_libraries()
    dist.destroy_process_group()


HERE = Path(__file__).parent
PATHS = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent), str(HERE.parent / 'evaluation')]}\n"
SLOW = [(2, "families"), (4, "0"), (4, "1"), (4, "2")]


@pytest.mark.parametrize(
    ("processes", "which"), [(2, "some"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_processes_that_share_a_window_compute_what_one_does(
    tmp_path: Path, processes: int, which: str
) -> None:
    script = PATHS + f"from test_split_window import run\nrun({which!r})"
    launch(script, where=tmp_path, processes=processes)


BLOCKS = [{"input_ids": ids, "labels": ids} for ids in torch.arange(12 * 20).view(12, 20) % 60]
PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
(TO_SPLIT,) = re.findall(r"^```\n(rx\.split_window.*)\n```$", PAGE, re.MULTILINE)


def trainer_of(kind: Any, output: str, split: int, **changes: Any) -> tuple[Trainer, list[Any]]:
    """A trainer that evaluates twice, and a list that gets the rows of its batches and evaluations."""
    model, rows = llama("yarn"), []

    class Noted(kind):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            rows.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *args)

    def metrics(evaluated: Any) -> dict[str, float]:
        rows.append([evaluated.label_ids[:, 0].tolist(), len(evaluated.predictions)])
        return {}

    arguments = TrainingArguments(output, **{
        "max_steps": 10, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "report_to": [],
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "no", "seed": 3,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "disable_tqdm": True, **changes,
    })  # fmt: skip
    data = {"train_dataset": BLOCKS[:7], "eval_dataset": BLOCKS[7:]}  # both with an incomplete batch
    trainer = Noted(model, arguments, compute_metrics=metrics, **data)
    if split:
        groups = "model" if split == dist.get_world_size() else f"model, dist.new_subgroups({split})[0]"
        exec(TO_SPLIT.replace("model", groups, 1), {**globals(), "model": model, "trainer": trainer})
    return trainer, rows


def trained(output: Path, split: int = 0) -> list[Any]:
    """What trainers trained and evaluated on and their losses: a run, a second one, and a resumed one."""
    found = []
    for kind, order in ((Trainer, "random"), (rx.RopeTrainer, "random"), (Trainer, "sequential")):
        where = {"output": str(output / kind.__name__ / order), "train_sampling_strategy": order}
        trainer, rows = trainer_of(kind, split=split, **where)
        trainer.train()
        trainer.train()
        saved = {"max_steps": 6, "save_strategy": "steps", "save_steps": 6}
        trainer_of(kind, split=split, **saved, **where)[0].train()
        resumed, more = trainer_of(kind, split=split, **where)
        resumed.train(resume_from_checkpoint=True)
        assert more == rows[7:12]  # steps 7 to 10, and the evaluation after them
        lines = trainer.state.log_history + resumed.state.log_history
        found.append([rows, [line[name] for line in lines for name in ("loss", "eval_loss") if name in line]])
    return found


class Stream(IterableDataset[int]):
    """Data without a length."""

    def __iter__(self) -> Any:
        return iter(range(6))


def gathered(split: int = 0) -> list[Any]:
    """What a loop of one's own gets with accelerate: a map, a stream, and objects, which have no axes."""
    accelerator, found = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)), []
    if split:
        change = rx.split_window(llama("yarn"), dist.new_subgroups(split)[0])
        change.same_batches(accelerator)
    for data in (range(5), Stream()):
        for batch in accelerator.prepare(DataLoader(data, batch_size=2)):
            objects = [str(each) for each in batch.tolist()]
            every = accelerator.gather_for_metrics(batch).tolist()
            found.append([batch.tolist(), every, accelerator.gather_for_metrics(objects)])
    if split:
        change.remove()
        loader = accelerator.prepare(DataLoader(range(8)))  # each process has rows of its own again
        every = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
        assert every == torch.arange(8).view(-1, dist.get_world_size()).tolist()
    return found


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_group_gets_the_batches_of_one_process(tmp_path: Path, groups: int) -> None:
    """In a run, a second one and a resumed one. An evaluation has each row once."""
    script = PATHS + "from test_split_window import *\nwhere, split = Path(sys.argv[1]), int(sys.argv[2])\n"
    script += "print(json.dumps({'trained': trained(where, split), 'gathered': gathered(split)}))"
    results = []
    for split in (0, 2):
        where, processes = tmp_path / f"split {split}", groups * (split or 1)
        where.mkdir()
        on_cpus = {"ACCELERATE_USE_CPU": "true"}
        said = launch(script, str(where), str(split), where=where, environment=on_cpus, processes=processes)
        results.append([json.loads(line) for line in said.splitlines() if line.startswith('{"trained"')])
    for rank, several in enumerate(results[1]):
        one = results[0][rank // 2]
        assert several["gathered"] == one["gathered"]
        for (rows, losses), (others, theirs) in zip(one["trained"], several["trained"], strict=True):
            assert others == rows
            assert theirs == pytest.approx(losses, rel=1e-6)
    assert len(results[1]) == 2 * groups


def test_ulysses_of_deepspeed_is_refused_where_it_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wraps the attention functions of modules that have the model's own config, and passes others by."""
    owned = []

    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        owned.append(module.config is model.config)
        return own(module, *args, **kwargs)

    wrapper.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", wrapper)
    for method in ("yarn", "sinusoidal"):
        model = llama(method)
        model(IDS)
    assert owned == [True] * 4
    for method in ("dynamic_yarn", "self_extend", "logn(yarn)", "alibi"):
        model = llama(method)
        with pytest.raises(PatchError, match=r"DeepSpeed's sequence parallelism \(sp_size\).*split_window"):
            model(IDS)
    assert len(owned) == 4


@pytest.mark.parametrize(
    ("processes", "instead"),
    [
        (2, "use rope_extend.split_window"),
        (3, r"4 heads cannot be shared by 3 processes.*\. Use one process, or"),
    ],
)
def test_a_refusal_of_ring_attention_says_what_works(
    processes: int, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_splits, "ring_mesh", lambda: SimpleNamespace(size=lambda: processes))
    with pytest.raises(PatchError, match=rf"dynamic_yarn.*{instead}.* a method with one table"):
        llama("dynamic_yarn")(IDS)


def test_what_cannot_be_shared_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    model = llama("yarn")
    with pytest.raises(RopeExtendError, match=r"not been connected with others.*torchrun"):
        rx.split_window(model)
    with pytest.raises(RopeExtendError, match="4 heads cannot be shared by 3 processes"):
        check_split(model, 3)
    cases = {case.model_type: case for case in ALL_FAMILIES}
    for family, reason in (
        ("bamba", "mix tokens without"), ("falcon_h1", "convolutions"), ("doge", "parameters besides"),
        ("falcon", "computes attention itself"),
    ):  # fmt: skip
        with pytest.raises(rx.UnsupportedModelError, match=f"{family} cannot be shared.*{reason}"):
            check_split(tiny_model(cases[family]), 2)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    stock = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "rope_parameters": rope}))
    with pytest.raises(rx.UnsupportedModelError, match=r"follows the longest text.*extend\(model"):
        check_split(stock, 2)
    for given, error in (
        (["--split-window", "5", "--plan"], "6 heads cannot be shared by 5 processes"),
        (["--split-window", "2", "--output", "never"], "--split-window 2 needs 2 processes, and there are 1"),
    ):
        rest = ["--methods", "none", "--lengths", "256", "--data", "demo:evaluation"]
        with pytest.raises(SystemExit, match="2"):
            command(["evaluate", str(MODEL_DIR), *rest, *given])
        assert error in capsys.readouterr().err
