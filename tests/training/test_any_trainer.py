"""Long windows under any trainer: blocks, the loss without logits, and `RopeTrainer`."""

from __future__ import annotations

import inspect
import math
import os
import re
import signal
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from cases import llama, tiny_model
from peft import LoraConfig, get_peft_model
from runs import assert_same, metrics, tokenizer_of, weights
from several_processes import launch
from test_distributed import AS_IF_GPUS, CONTEXT, RING_ON_CPU
from test_loss import IGNORED, VOCABULARY, batch, gradients, tiny
from tolerances import GAIN, TERMS, assert_same_but_rounding, rounding
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import dry_run_attention
from rope_extend.training.finetune import FinetuneInterrupted, Recipe, finetune
from rope_extend.training.resume import checkpoints
from rope_extend.training.training_data import load_data

IDS, LABELS = batch()
SMALL = 4 * VOCABULARY * 3
"""Bytes of a chunk of three tokens."""
INPUTS = {
    "plain": {"labels": LABELS},
    "padded": {"labels": LABELS, "attention_mask": (torch.arange(23) > torch.tensor([[2], [0]])).long()},
    "packed": {
        "labels": LABELS,
        "position_ids": torch.cat([torch.arange(9), torch.arange(14)])[None],
        "use_cache": False,
    },
    "accumulated": {"labels": LABELS, "num_items_in_batch": torch.tensor(70)},
    "another label to ignore": {"labels": LABELS.where(LABELS > 9, 3), "ignore_index": 3},
    "shifted": {"labels": LABELS, "shift_labels": LABELS.roll(3, 1)},
    "a tuple": {"labels": LABELS, "return_dict": False},
    "nothing to predict": {"labels": torch.full_like(IDS, IGNORED), "num_items_in_batch": 5},
}


def step(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and gradients of a training step; the first row alone if its positions are packed."""
    model.zero_grad(set_to_none=True)
    rows = slice(0, 1) if "position_ids" in inputs else slice(None)
    inputs = {name: value[rows] if getattr(value, "ndim", 0) else value for name, value in inputs.items()}
    loss: torch.Tensor = model(IDS[rows], **inputs)[0]
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_loss_and_gradients_are_those_of_the_models_own_forward(inputs: dict[str, Any]) -> None:
    model = tiny("llama", attn_implementation="sdpa")
    rx.extend(model, 512, "yarn")
    adapter = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    stock = step(adapter, inputs)
    with rx.chunked_loss(adapter, chunk_bytes=SMALL):
        found = step(adapter, inputs)
    assert found.keys() == stock.keys()
    for name, value in stock.items():
        assert found[name].dtype == value.dtype == torch.float32
        assert_same_but_rounding(found[name], value)


def test_it_is_undone_and_copies_are_their_own() -> None:
    model = tiny("llama")
    own = inspect.signature(model.forward)
    handle = rx.chunked_loss(model)
    assert inspect.signature(model.forward) == own  # trainers choose columns by it
    with pytest.raises(RopeExtendError, match="this loss already"):
        rx.chunked_loss(model)
    twin = deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert twin(IDS, labels=LABELS).logits is None
    assert not torch.equal(twin(IDS, labels=LABELS).loss, model(IDS, labels=LABELS).loss)
    assert torch.equal(model(IDS).logits, tiny("llama")(IDS).logits)
    handle.remove()
    handle.remove()
    assert "forward" not in vars(model)
    assert model(IDS, labels=LABELS).logits is not None
    assert twin(IDS, labels=LABELS).logits is None  # a copy has its own
    # accelerate wraps the forward of the instance, and leaves its wrapper there.
    with rx.chunked_loss(model):
        inner = model.forward
        model.forward = lambda *args, **options: inner(*args, **options)
        assert model(IDS, labels=LABELS).logits is None
    assert model(IDS, labels=LABELS).logits is not None


def test_what_it_cannot_compute_is_refused() -> None:
    model = tiny("llama")
    with rx.chunked_loss(model), pytest.raises(RopeExtendError, match="output_hidden_states was asked for"):
        model(IDS, labels=LABELS, output_hidden_states=True)
    with rx.chunked_loss(tiny("llama4_text")) as handle, pytest.raises(RopeExtendError, match="router loss"):
        handle.model(IDS, labels=LABELS, output_router_logits=True)
    with rx.chunked_loss(model):
        model.config.output_router_logits = True
        with pytest.raises(RopeExtendError, match="has no router loss"):
            model(IDS, labels=LABELS)
    with pytest.raises(RopeExtendError, match="output_router_logits"):
        rx.chunked_loss(model)
    other = tiny("llama")
    other.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(RopeExtendError, match="a loss of its own"):
        rx.chunked_loss(other)
    with pytest.raises(RopeExtendError, match="got Linear"):
        rx.chunked_loss(torch.nn.Linear(2, 2))


def test_memory_of_a_long_step_with_a_large_vocabulary() -> None:
    """A step at 32k tokens with 128k words takes at most 0.3 of stock's memory."""
    config = LlamaConfig(
        vocab_size=131_072, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    rx.extend(model, "32k")
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(1, 32_768, dtype=torch.int64, device="meta")

    def peak() -> int:
        memory = LiveBytes(scored=2 * 128)
        for tensor in model.parameters():
            memory.add(tensor)
        with dry_run_attention(model, maskless=True), memory:
            model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel(), use_cache=False)[0].backward()
        return memory.peak

    stock = peak()
    with rx.chunked_loss(model):
        assert peak() <= 0.3 * stock


def trainer(kind: str, model: Any, blocks: Any, output: Path, tokenizer: Any, **changes: Any) -> Trainer:
    settings = {
        "output_dir": str(output), "max_steps": 3, "per_device_train_batch_size": 1, "report_to": [],
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "adam_beta2": 0.95, "use_cpu": True,
        "disable_tqdm": True, "seed": 0, "save_strategy": "no", "bf16": False, "optim": "adamw_torch",
        "gradient_checkpointing": True, "train_sampling_strategy": "sequential", **changes,
    }  # fmt: skip
    if kind == "RopeTrainer":
        return rx.RopeTrainer(model, TrainingArguments(**settings), train_dataset=blocks)
    callbacks = [rx.SaveEncodingCallback()]
    # With a tokenizer, the collator adds a mask of ones, which switches off transformers' own separation.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    common = {"callbacks": callbacks, "processing_class": tokenizer}
    if kind == "Trainer":
        return Trainer(model, TrainingArguments(**settings), train_dataset=blocks, **common)
    data, collator = settings.pop("data", None), settings.pop("collator", default_data_collator)
    rows = datasets.Dataset.from_list([{k: v.tolist() for k, v in block.items()} for block in blocks])
    right = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    arguments = SFTConfig(**right | settings)
    return SFTTrainer(model, arguments, train_dataset=data or rows, data_collator=collator, **common)


def train(kind: str, run: Recipe, output: Path, **changes: Any) -> Trainer:
    """Train as `run` did, on the same blocks in the same order, and save where `save_model` does."""
    tokenizer = tokenizer_of(run)
    order = load_data(run, tokenizer, (), 32).blocks
    model = AutoModelForCausalLM.from_pretrained(run.model)
    rx.extend(model, run.target_length, run.method)
    chunked = rx.chunked_loss(model, chunk_bytes=4 * 64 * 50)
    documents = rx.load_documents(run.data, tokenizer)
    blocks = rx.blocks(documents, run.target_length, packing=run.packs, model=model)
    numbers = {tuple(block["input_ids"].tolist()): number for number, block in enumerate(blocks)}
    sequence = [tuple(order[n]["input_ids"].tolist()) for n in range(3 * run.gradient_accumulation)]
    chosen = [blocks[numbers[tokens]] for tokens in sequence]
    set_seed(run.seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(r=4, lora_alpha=run.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    training = trainer(kind, model, chosen, output, tokenizer, **changes)
    with chunked:
        training.train()
        assert math.isfinite(training.evaluate(training.train_dataset)["eval_loss"])
    training.save_model()
    return training


@pytest.mark.parametrize("kind", ["Trainer", "RopeTrainer", "SFTTrainer"])
@pytest.mark.parametrize("packing", ["none", "restart"])
def test_trainers_end_with_the_adapter_of_the_command(
    recipe: Recipe, tmp_path: Path, packing: str, kind: str
) -> None:
    """Bit for bit, unless TRL computes the loss, or a mask separates documents instead of their lengths."""
    same = {"learning_rate": 1e-2, "warmup_steps": 0, "lora_dropout": 0.0, "gradient_checkpointing": True}
    run, output = replace(recipe, method="yarn", steps=3, packing=packing, **same), tmp_path / "theirs"
    finetune(run)
    trained = train(kind, run, output, gradient_accumulation_steps=2, logging_steps=1)
    ours, theirs = weights(run.output_dir), weights(output)
    assert ours.keys() == theirs.keys()
    errors = torch.cat([(theirs[name] - value).abs().flatten() for name, value in ours.items()])
    # Adam normalises each gradient, so one that is itself rounding moves a weight either way.
    bound = run.learning_rate * run.steps * GAIN * rounding(torch.float32, TERMS)
    assert float((errors <= bound).float().mean()) >= 0.999
    before, after = (rx.current_patch(rx.load(each)) for each in (run.output_dir, output))
    assert before.encoding == after.encoding
    logged = [line for line in trained.state.log_history if "grad_norm" in line]
    for line, other in zip(metrics(run.output_dir), logged, strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-4)
    if kind != "SFTTrainer" and packing == "none":
        assert_same(ours, theirs)


IN_RINGS = """
import sys
from dataclasses import replace
from pathlib import Path
from test_any_trainer import Recipe, RopeExtendError, finetune, train
recipe, output = Recipe.from_yaml(sys.argv[1]), Path(sys.argv[2])
for change in ({"method": "dynamic_yarn"}, {"method": "alibi"}, {"method": "yarn"}):
    run = replace(recipe, output_dir=str(output / "run"), packing="restart", **change)
    for kind in ("Trainer", "SFTTrainer", "finetune"):
        try:
            finetune(run) if kind == "finetune" else train(kind, run, output / kind, use_cpu=False)
        except RopeExtendError as error:
            print(kind, *change.values(), str(error))
"""


@pytest.mark.slow
def test_what_ring_attention_would_get_wrong_is_refused_in_any_trainer(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Context parallelism of accelerate: no hang, and no document that sees another."""
    text = Path(recipe.data, "a.txt").read_text()
    (tmp_path / "data").mkdir()
    for start in range(0, 6000, 150):  # several documents in each block
        (tmp_path / "data" / f"{start}.txt").write_text(text[start : start + 150])
    run = replace(recipe, method="yarn", steps=1, data=str(tmp_path / "data"))
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    paths = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}\n"
    arguments = (str(tmp_path / "run.yaml"), str(tmp_path))
    said = launch(
        AS_IF_GPUS + RING_ON_CPU + paths + IN_RINGS, *arguments, where=tmp_path, environment=CONTEXT
    )
    for kind in ("Trainer", "SFTTrainer", "finetune"):
        for method in ("dynamic_yarn", "alibi", "yarn"):
            assert len(re.findall(rf"^{kind} {method} .*cp_size 2", said, re.MULTILINE)) == 2, said


@pytest.mark.parametrize("positions", [None, "pose"], ids=["packed", "pose"])
def test_trl_trains_the_blocks_that_it_was_given_or_stops_before_the_first_step(
    recipe: Recipe, tmp_path: Path, positions: str | None
) -> None:
    tokenizer = tokenizer_of(recipe)
    model = AutoModelForCausalLM.from_pretrained(recipe.model)
    rx.extend(model, 128, "yarn")
    rx.chunked_loss(model)
    documents = rx.load_documents(recipe.data, tokenizer)
    blocks = rx.blocks(documents, 64, packing=positions is None, positions=positions, model=model)
    seen: list[torch.Tensor] = []
    model.model.register_forward_pre_hook(
        lambda _module, _args, given: seen.append(given["position_ids"]), with_kwargs=True
    )

    def run(**changes: Any) -> None:
        changes = {"data": blocks.to_dataset(), "max_steps": 1, "gradient_checkpointing": False, **changes}
        trainer("SFTTrainer", model, blocks, tmp_path / "sft", tokenizer, **changes).train()

    for wrong in (
        {"collator": None},  # TRL's own, which makes no positions
        {"collator": DataCollatorWithFlattening()},
        {"data": None, "remove_unused_columns": True, "collator": None},
        {"data": None, "dataset_kwargs": None, "max_length": 32},
    ):
        with pytest.raises(RopeExtendError, match=r"does not train the blocks .*batches differ.*skip_prep"):
            run(**wrong)
        assert not seen
    run()
    assert torch.equal(seen[0][0], blocks[0]["position_ids"])


def extended() -> Any:
    model = llama()
    rx.patch_model(model, rx.encoding("yarn", factor=8.0), target_length=256)
    return model


def test_sampled_positions_follow_from_the_number_of_a_block() -> None:
    model = extended()
    documents = [rx.Document("one", torch.arange(200) % 60), rx.Document("short", torch.arange(9))]
    blocks = rx.blocks(documents, 32, positions="pose", model=model, seed=3)
    collator = rx.PositionCollator("pose", 256, seed=3)
    again = rx.blocks(documents, "32", positions="pose", model=model, seed=3)
    plain = rx.blocks(documents, 32)
    assert len(blocks) == len(plain) == 6
    for number in (5, 0, -1):
        item = blocks[number]
        assert item["position_ids"].tolist() == collator.positions(32, number % 6).tolist()
        assert torch.equal(item["input_ids"], plain[number]["input_ids"])
        assert item["attention_mask"].all()
        assert all(torch.equal(value, again[number][name]) for name, value in item.items())
    assert len(list(blocks)) == 6
    assert "at positions pose" in repr(blocks)


PADDED = torch.ones(2, 24, dtype=torch.int64)
PADDED[0, :3] = PADDED[1, -4:] = 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "falcon", "afmoe"])
@pytest.mark.parametrize("mask", [None, torch.ones_like(PADDED), PADDED], ids=["no mask", "ones", "padding"])
def test_packed_documents_do_not_see_each_other(family: str, mask: torch.Tensor | None) -> None:
    """Some of these families make their masks without looking at the positions."""
    model = tiny_model(family).eval()
    rx.extend(model, 256, "yarn")
    with rx.chunked_loss(model):
        blocks = rx.blocks([rx.Document("one", torch.arange(3, 60))] * 3, 24, packing=True, model=model)
        positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
        ids = torch.arange(3, 51).view(2, -1)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        packed = model(**inputs).logits
    assert_same_but_rounding(packed[1:, :10], model(ids[1:, :10]).logits)
    for row, end in enumerate((24, 20)):
        alone = model(ids[row : row + 1, 10:end]).logits
        assert_same_but_rounding(packed[row : row + 1, 10:end], alone)
    assert set(blocks[0]) == {"input_ids", "labels", "position_ids"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True, "positions": "pose"}, "cannot be combined"),
        ({"packing": True, "model": None}, "needs the extended model"),
        ({"positions": "pose", "model": None}, "needs the extended model"),
        ({"positions": "pse"}, "no position sampler is named 'pse'; use one of pose"),
        ({"positions": "pose", "seed": -1}, "seed must be at least 0; got -1"),
        (
            {"positions": "pose", "length": 256},
            "length 256 must be less than 256, to which model is extended",
        ),
        ({"positions": "pose", "length": 2}, "3 to 256 tokens"),
        ({"length": 257}, "length 257 must be at most 256"),
        ({"length": 250}, "none of 1 documents has 250 tokens"),
        ({"packing": True, "length": 250}, "200 tokens together"),
        ({"vocabulary": 65}, "contain token 64, but the model has the tokens 0 to 63"),
        ({"packing": True, "chunked": False}, r"needs rope_extend.chunked_loss\(model\)"),
        ({"positions": "pose", "method": "alibi"}, "only rotary methods use sampled positions"),
    ],
    ids=str,
)
def test_blocks_that_do_not_suit_the_model_are_refused(options: dict[str, Any], message: str) -> None:
    model = extended()
    options = {"length": 32, "model": model, **options}
    if options.pop("chunked", True):
        rx.chunked_loss(model)
    if method := options.pop("method", None):
        rx.patch_model(model, rx.encoding(method), target_length=256)
    documents = [rx.Document("one", torch.arange(200) % options.pop("vocabulary", 60))]
    with pytest.raises(RopeExtendError, match=message):
        rx.blocks(documents, **options)


ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.arange(5 * 12).view(5, 12) % 60]


class Stream(IterableDataset[Any]):
    """Rows without a number."""

    def __iter__(self) -> Any:
        return iter(ROWS)


class Stop(TrainerCallback):  # type: ignore[misc]
    """SIGTERM after the second step, once."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and self.__dict__.setdefault("first", True):
            self.first = False
            os.kill(os.getpid(), signal.SIGTERM)


def made(output: Path, data: Any = ROWS, **changes: Any) -> rx.RopeTrainer:
    options = {name: changes.pop(name) for name in ("callbacks", "eval_dataset") if name in changes}
    settings = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "report_to": [],
        "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True, **changes,
    }  # fmt: skip
    arguments = TrainingArguments(str(output), **settings)
    return rx.RopeTrainer(extended(), arguments, train_dataset=data, **options)


SHORT = [{name: ids[:8] for name, ids in row.items()} for row in ROWS]


@pytest.mark.parametrize(
    ("data", "batch_size", "tokens"),
    [(ROWS, 2, [24, 48, 60]), (Stream(), 2, [24, 48, 60]), ([ROWS[0], *SHORT], 1, [12, 20, 28])],
    ids=["incomplete batch", "stream", "unequal rows"],
)
def test_tokens_are_those_of_the_batches(
    tmp_path: Path, data: Any, batch_size: int, tokens: list[int]
) -> None:
    order = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": batch_size}
    made(tmp_path, data, max_steps=3, **order).train()
    assert [line["tokens"] for line in metrics(tmp_path)] == tokens


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_an_interrupted_run_has_a_checkpoint_from_which_its_trainer_continues(
    tmp_path: Path, strategy: str
) -> None:
    trainer = made(tmp_path, callbacks=[Stop()], save_strategy=strategy, save_steps=500)
    with pytest.raises(FinetuneInterrupted) as stopped:
        trainer.train()
    assert stopped.value.checkpoint == checkpoints(tmp_path)[-1] == tmp_path / "checkpoint-2"
    for _ in range(2):  # a finished run takes no further step
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == trainer.progress.step == 4
    whole = made(tmp_path / "whole", save_strategy="no")
    whole.train()
    ours, theirs = trainer.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    whole.train()  # from the first step
    assert whole.progress.tokens == 24 + 24 + 12 + 24
    assert [line["step"] for line in metrics(tmp_path / "whole")] == [1, 2, 3, 4]


def test_metrics_that_are_not_finite_are_null(tmp_path: Path) -> None:
    (trainer := made(tmp_path)).state.log_history = [{"perplexity": {32: float("nan")}}]
    trainer._write_metrics()
    assert metrics(tmp_path) == [{"perplexity": {"32": None}}]


def test_a_new_run_does_not_replace_the_checkpoints_of_another(tmp_path: Path) -> None:
    made(tmp_path).train()
    before = checkpoints(tmp_path)
    made(tmp_path / "other", max_steps=1).train()
    for checkpoint in (None, str(tmp_path / "other/checkpoint-1")):
        with pytest.raises(RopeExtendError, match=r"checkpoint-4 of another run.*resume_from_che"):
            made(tmp_path, max_steps=2).train(checkpoint)
    assert checkpoints(tmp_path) == before
    with pytest.raises(RopeExtendError, match="4 steps are done, and not 3; raise steps"):
        made(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    made(tmp_path / "weights", save_only_model=True, max_steps=2).train()
    with pytest.raises(RopeExtendError, match="checkpoint-2 has no optimizer, which save_only_model leaves"):
        made(tmp_path / "weights").train(resume_from_checkpoint=True)


def test_arguments_that_need_checkpoints_in_their_final_place_are_refused(tmp_path: Path) -> None:
    evaluating = {"eval_dataset": ROWS, "eval_strategy": "steps", "eval_steps": 1}
    for changes in ({"push_to_hub": True}, {"load_best_model_at_end": True}, {"save_strategy": "best"}):
        with pytest.raises(RopeExtendError, match=r"do not work with RopeTrainer.*SaveEncodingCallback"):
            made(tmp_path, metric_for_best_model="loss", **evaluating, **changes)
