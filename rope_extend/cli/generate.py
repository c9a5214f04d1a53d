"""The command that asks a model about a long text: generate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rope_extend.cli.arguments import add_base_model, add_trained_length, checkpoint, length, one_method, path
from rope_extend.errors import RopeExtendError
from rope_extend.models.load_choices import ATTENTION, DTYPES, QUANTIZED
from rope_extend.models.locating import check_checkpoint


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    parser.add_argument(
        "model", type=checkpoint, help="a run of finetune, a checkpoint's directory, or a hub id"
    )
    parser.add_argument("--file", type=path, required=True, metavar="FILE", help="long text, in UTF-8")
    parser.add_argument(
        "--ask", metavar="QUESTION", help="question after the text (default: continue the text)"
    )
    parser.add_argument(
        "--new-tokens", type=length, default=200, metavar="N", help="longest answer in tokens (default: 200)"
    )
    parser.add_argument(
        "--max-tokens", type=length, metavar="N",
        help="longest prompt in tokens (default: the window of the model, less the answer)",
    )  # fmt: skip
    parser.add_argument(
        "--target-length", type=length, metavar="N",
        help="extend a checkpoint without training to this window, and answer before and after",
    )  # fmt: skip
    parser.add_argument("--method", type=one_method, metavar="NAME", help="method for that (default: yarn)")
    add_trained_length(parser)
    add_base_model(parser)
    parser.add_argument("--no-before", action="store_true", help="answer only with the extended model")
    parser.add_argument("--no-chat", action="store_true", help="do not use the tokenizer's chat template")
    group = parser.add_argument_group("loading")
    group.add_argument("--device", metavar="DEVICE", help="device, such as cuda:1 (default: the GPU, if any)")
    group.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights (default: bfloat16 on a GPU, else float32)"
    )
    group.add_argument(
        "--attn",
        dest="attention",
        choices=ATTENTION,
        metavar="NAME",
        help="attention implementation (default: sdpa)",
    )
    group.add_argument("--quantize", choices=QUANTIZED, help="quantize the weights on load, by bitsandbytes")


def generate(arguments: argparse.Namespace) -> None:
    """Ask a model about a long text, before and after its extension.

    The answer is the most likely one (greedy), and appears while it is generated. If the tokenizer has a chat
    template, a question uses it. A text that is too long for the window loses its end, and a line says so.
    """
    if not Path(arguments.file).is_file():
        raise RopeExtendError(f"no such file: {arguments.file!r} (seen from {Path.cwd()})")
    try:
        text = Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RopeExtendError(f"cannot read {arguments.file} as UTF-8 text: {error}") from error
    if not text.strip():
        raise RopeExtendError(f"{arguments.file} is empty; give a file with text")
    check_checkpoint(arguments.model)  # before torch is imported

    import torch

    from rope_extend.evaluation.answering import Subjects, answer, long_prompt
    from rope_extend.models.load_options import LoadOptions

    subjects = Subjects.of(
        arguments.model, base_model=arguments.base_model, target_length=arguments.target_length,
        method=arguments.method, trained_length=arguments.trained_length,
    )  # fmt: skip
    if arguments.no_before and not subjects.is_extended:
        raise RopeExtendError(
            f"{arguments.model} is not extended here, so --no-before has no answer to leave out; give "
            "--target-length, or leave --no-before out"
        )
    options = LoadOptions(
        device=arguments.device, dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        attention=arguments.attention, quantize=arguments.quantize,
    )  # fmt: skip
    tokenizer = subjects.load_tokenizer()
    window = subjects.target_length - arguments.new_tokens
    if window < 1:
        raise RopeExtendError(
            f"an answer of {arguments.new_tokens:,} tokens leaves no room in a window of "
            f"{subjects.target_length:,}; use a smaller --new-tokens"
        )
    most = arguments.max_tokens or window
    if most > window:
        raise RopeExtendError(
            f"--max-tokens {most:,} and an answer of {arguments.new_tokens:,} exceed the window of "
            f"{subjects.target_length:,} tokens; use at most {window:,}"
        )
    prompt = long_prompt(tokenizer, text, arguments.ask, most, chat="off" if arguments.no_chat else "auto")
    cut = (
        f"the first {prompt.used:,} of {prompt.total:,}"
        if prompt.used < prompt.total
        else f"{prompt.total:,}"
    )
    print(f"{arguments.file}: {cut} tokens; prompt: {len(prompt.ids):,} tokens", file=sys.stderr)
    for label, model in subjects.answerers(options, before=not arguments.no_before):
        print(f"--- {label}", flush=True)
        answer(
            model, tokenizer, prompt.ids, arguments.new_tokens, lambda piece: print(piece, end="", flush=True)
        )
        print()
