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

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, TrainingArguments, default_data_collator, set_seed

import rope_extend as rx
from rope_extend.cli.arguments import run_script
from rope_extend.data.blocks import as_many_tokens
from rope_extend.data.documents import fingerprint
from rope_extend.journal import differences
from rope_extend.models.loading import pretrained

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
parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
parser.add_argument("--output", default="adapter")
parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --output")


def extend(model: Any, args: argparse.Namespace, tokenizer: Any = None) -> rx.Patch:
    """Extend the model; `none` leaves plain RoPE as it is, for the control."""
    if args.method != "none":
        return rx.extend(model, args.target_length, args.method, tokenizer=tokenizer)
    target = rx.parse_lengths(args.target_length)[0]
    return rx.patch_model(model, rx.encoding("none"), target_length=target, tokenizer=tokenizer)


def main(args: argparse.Namespace) -> None:
    if min(args.steps, args.batch_size) < 1 or not 0 < args.learning_rate < 1:
        parser.error("--steps and --batch-size must be at least 1, --learning-rate between 0 and 1")
    output, written = Path(args.output), Path(args.output, "settings.json")
    resumes = args.resume and any(output.glob("checkpoint-*"))
    if not resumes and any(file != written for file in output.glob("*")):
        advice = ", but no checkpoint to resume" if args.resume else "; add --resume to continue that run"
        parser.error(f"{args.output} holds files{advice}, or give another --output")
    length = rx.parse_lengths(args.block_length or args.target_length)[0]
    set_seed(0)

    pretrained(AutoConfig, args.model)  # refuses an adapter, which is to be merged first
    tokenizer = rx.load_tokenizer(args.model)
    empty = rx.load_any(args.model, empty=True)  # without weights, to find mistakes at once
    extend(empty, args)
    documents = rx.load_documents(args.data, tokenizer, min_tokens=length)
    blocks = rx.blocks(documents, length, positions=args.positions, model=empty)
    free = dict.fromkeys(("output", "resume", "steps", "gradient_checkpointing"))  # may change on the way
    given = {**vars(args), **free, "text": fingerprint(documents)}
    if resumes and written.exists() and (changed := differences(json.loads(written.read_text()), given)):
        parser.error(f"{args.output} has a run with other settings: {changed}; restore them, or give another "
                     "--output")  # fmt: skip

    model = rx.load_any(args.model)
    patch = extend(model, args, tokenizer)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    print(f"{len(documents)} documents, {len(blocks)} blocks of {length} tokens")
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
        output.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(given))
    trainer.train(resume_from_checkpoint=args.resume)
    if writes:
        rx.save(model, args.output, tokenizer=tokenizer, overwrite=True)
        print(f"saved an adapter in {args.output}")
        if args.method != "none":
            print_next(args, patch, length, settings.world_size)


def print_next(args: argparse.Namespace, patch: rx.Patch, length: int, processes: int) -> None:
    """Print how to train the control on as many tokens, and how to evaluate both."""
    window, control, script = patch.shape.trained_length, f"{args.output}-control", Path(sys.argv[0])
    evaluate = script.with_name("evaluate.py")
    block, batch, steps = as_many_tokens(window, length, args.batch_size * processes, args.steps)
    training = [
        "python", script, args.model, *args.data, "--method", "none", "--target-length", window,
        "--block-length", block, "--batch-size", batch, "--steps", steps,
        "--learning-rate", args.learning_rate, "--output", control,
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
    run_script(parser, main)  # prints a mistake in one sentence
