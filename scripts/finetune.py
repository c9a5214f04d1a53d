"""Adapt a model to a longer window with LoRA, by the Trainer of transformers. Copy it and change it.

python scripts/finetune.py MODEL TEXT... --target-length 32k --method yarn --output adapter

It saves a checkpoint every 50 steps. The same command with --resume continues from the latest one. At the
end, --output holds an adapter for `rope_extend.load` and `rope-extend evaluate`.
"""

import argparse
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, TrainingArguments, default_data_collator, set_seed

import rope_extend as rx
from rope_extend.cli.arguments import flag_table, in_flags
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
parser.add_argument("--output", default="adapter")
parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --output")


def main(args: argparse.Namespace) -> None:
    if min(args.steps, args.batch_size) < 1:
        parser.error("--steps and --batch-size must be at least 1")
    output = Path(args.output)
    resumes = args.resume and any(output.glob("checkpoint-*"))
    if not resumes and output.is_dir() and any(output.iterdir()):
        advice = ", but no checkpoint to resume" if args.resume else "; add --resume to continue that run"
        parser.error(f"{args.output} holds files{advice}, or give another --output")
    length = rx.parse_lengths(args.block_length or args.target_length)[0]
    set_seed(0)

    pretrained(AutoConfig, args.model)  # refuses an adapter, which is to be merged first
    tokenizer = rx.load_tokenizer(args.model)
    rx.extend(rx.load_any(args.model, empty=True), args.target_length, args.method)  # finds mistakes at once
    documents = rx.load_documents(args.data, tokenizer, min_tokens=length)

    model = rx.load_any(args.model)
    rx.extend(model, args.target_length, args.method, tokenizer=tokenizer)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    blocks = rx.blocks(documents, length, positions=args.positions, model=model)
    print(f"{len(documents)} documents, {len(blocks)} blocks of {length} tokens")
    rx.chunked_loss(model)  # the same loss, without holding the logits of all tokens
    settings = TrainingArguments(
        args.output, max_steps=args.steps, per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate, lr_scheduler_type="cosine", warmup_steps=max(1, args.steps // 20),
        logging_steps=10, save_steps=50, save_total_limit=2, report_to=[],
    )  # fmt: skip
    trainer = rx.RopeTrainer(  # transformers' Trainer, with checkpoints that are whole, and know the encoding
        model,
        settings,
        train_dataset=blocks,
        data_collator=default_data_collator,  # blocks have one length, and not every tokenizer can pad
        processing_class=tokenizer,  # so that checkpoints have it too
    )
    trainer.train(resume_from_checkpoint=args.resume)
    rx.save(model, args.output, tokenizer=tokenizer, overwrite=True)
    print(f"saved an adapter in {args.output}; next: python scripts/evaluate.py {args.output} TEXT...")


if __name__ == "__main__":
    try:
        main(parser.parse_args())
    except (rx.RopeExtendError, OSError) as error:  # a mistake: one sentence, no traceback
        parser.exit(2, f"{parser.prog}: error: {in_flags(str(error), flag_table(parser))}\n")
