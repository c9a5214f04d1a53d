"""Adapt a model to a longer window with LoRA, by the Trainer of transformers. Copy it and change it.

python scripts/finetune.py MODEL TEXT... --target-length 32k --method yarn --output adapter

It saves a checkpoint every 50 steps. The same command with --resume continues from the latest one. At the
end, --output holds an adapter for `rope_extend.load` and `rope-extend evaluate`.

The control of the longer context is the same training within the old window: --method none, with that window
as --target-length. The last lines say with which flags it gets as many tokens.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainingArguments, default_data_collator, set_seed

import rope_extend as rx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory, GGUF file or hub id of a causal language model")
parser.add_argument("data", nargs="+", help="text files, directories, a hub dataset, or demo:finetuning")
parser.add_argument("--target-length", required=True, help="new window in tokens, such as 32k")
parser.add_argument("--method", default="yarn", help="see `rope-extend methods`")
parser.add_argument("--block-length", help="tokens of a training block (default: the target length)")
parser.add_argument("--positions", help="pose, cream or random: short blocks, positions of the whole window")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=2e-4)
parser.add_argument("--lora-rank", type=int, default=16)
parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
parser.add_argument("--output", default="adapter")
parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --output")


def main(args: argparse.Namespace) -> None:
    args.output = str(Path(args.output).expanduser())
    resumes = check_flags(args)
    set_seed(0)
    tokenizer = rx.load_tokenizer(args.model)
    empty = extended(args, tokenizer, empty=True)  # without weights, so that mistakes are found at once
    length = rx.parse_length(args.block_length or args.target_length)
    documents = rx.load_documents(args.data, tokenizer, min_tokens=length)
    blocks = rx.blocks(documents, length, positions=args.positions, model=empty)
    given = settings_of_run(args, documents, resumes)
    print(f"{len(documents)} documents, {len(blocks)} blocks of {length} tokens")

    rank = args.lora_rank
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(extended(args, tokenizer), lora)
    model.print_trainable_parameters()
    rx.chunked_loss(model)  # the same loss, without holding the logits of all tokens
    settings = TrainingArguments(
        args.output, max_steps=args.steps, per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate, lr_scheduler_type="cosine", warmup_steps=max(1, args.steps // 20),
        logging_steps=10, save_steps=50, save_total_limit=2, report_to=[],
        gradient_checkpointing=args.gradient_checkpointing or None,
    )  # fmt: skip
    trainer = rx.RopeTrainer(  # transformers' Trainer, with checkpoints that are whole, and know the encoding
        model,
        settings,
        train_dataset=blocks,
        data_collator=default_data_collator,  # blocks have one length, and not every tokenizer can pad
        processing_class=tokenizer,  # so that checkpoints have it too
    )
    if writes := trainer.is_world_process_zero():  # of several processes, one writes
        Path(args.output).mkdir(parents=True, exist_ok=True)
        Path(args.output, "settings.json").write_text(json.dumps(given))
    trainer.train(resume_from_checkpoint=args.resume)
    if writes:
        rx.save(model, args.output, tokenizer=tokenizer, overwrite=True)
        print(f"saved an adapter in {args.output}")
        if args.method != "none":
            print_next(args, model, length, trainer)


def extended(args: argparse.Namespace, tokenizer: Any, *, empty: bool = False) -> Any:
    """The model with its new window. The method `none` leaves plain RoPE as it is, for the control."""
    model = rx.load_any(args.model, empty=empty)
    if isinstance(model, PeftModel):
        parser.error(f"{args.model} is an adapter. Merge it first")
    if args.method == "none":
        target = rx.parse_length(args.target_length)
        rx.patch_model(model, rx.encoding("none"), target_length=target, tokenizer=tokenizer)
    else:
        rx.extend(model, args.target_length, args.method, tokenizer=tokenizer)
    return model


# What follows spares its user mistakes. Training needs none of it.


def check_flags(args: argparse.Namespace) -> bool:
    """Refuse impossible numbers, and to replace files. Returns whether there is a checkpoint to resume."""
    if min(args.steps, args.batch_size, args.lora_rank) < 1 or not 0 < args.learning_rate < 1:
        parser.error("--steps, --batch-size, --lora-rank must be at least 1, --learning-rate between 0 and 1")
    if Path(args.model, "adapter_config.json").exists():
        merge = f"rope-extend merge {args.model} --output merged"
        parser.error(f"{args.model} is an adapter. Merge it first: {merge}")
    output = Path(args.output)
    resumes = args.resume and any(output.glob("checkpoint-*"))
    if not resumes and any(file.name != "settings.json" for file in output.glob("*")):
        advice = ", but no checkpoint to resume" if args.resume else "; add --resume to continue that run"
        parser.error(f"{args.output} holds files{advice}, or give another --output")
    return resumes


def settings_of_run(args: argparse.Namespace, documents: list[rx.Document], resumes: bool) -> dict[str, Any]:
    """What a run was given. Refuses to resume one that was given something else."""
    free = dict.fromkeys(("output", "resume", "steps", "gradient_checkpointing"))  # may change on the way
    given = {**vars(args), **free, "text": rx.fingerprint(documents)}
    written = Path(args.output, "settings.json")
    before = json.loads(written.read_text()) if resumes and written.exists() else given
    pairs = [(name, before.get(name, parser.get_default(name)), now) for name, now in given.items()]
    if changed := [f"{name} (was {then})" for name, then, now in pairs if then != now]:
        parser.error(f"{args.output} has a run with other settings: {', '.join(changed)}; restore them, or "
                     "give another --output")  # fmt: skip
    return given


def print_next(args: argparse.Namespace, model: Any, length: int, trainer: rx.RopeTrainer) -> None:
    """Print how to train the control on as many tokens, and how to evaluate both."""
    patch = rx.current_patch(model)
    window, control, script = patch.shape.trained_length, f"{args.output}-control", Path(sys.argv[0])
    evaluate = script.with_name("evaluate.py")
    blocks = args.batch_size * trainer.args.world_size
    block, batch, _ = rx.as_many_tokens(window, length, blocks, args.steps)
    steps = round(trainer.progress.tokens / (block * batch))  # a part may have run with other processes
    training = [
        "python", script, args.model, *args.data, "--method", "none", "--target-length", window,
        "--block-length", block, "--batch-size", batch, "--steps", steps,
        "--learning-rate", args.learning_rate, "--lora-rank", args.lora_rank, "--output", control,
        *["--gradient-checkpointing"] * args.gradient_checkpointing,
        *["--resume"] * Path(control).exists(),  # of a run that was trained for longer
    ]  # fmt: skip
    evaluation = [
        "python", evaluate if evaluate.exists() else "path/to/scripts/evaluate.py", args.output,
        "path/to/other/documents", "--lengths", f"{window},{patch.target_length}",
        "--control-adapter", control, "--output", f"{args.output}-ppl",
        *["--overwrite"] * Path(f"{args.output}-ppl").exists(),
    ]  # fmt: skip
    print("next: train its control, and compare both on other documents")
    for words in (training, evaluation):
        print(f"  {shlex.join(map(str, words))}")


if __name__ == "__main__":
    rx.run_script(parser, main)  # prints a mistake in one sentence
