"""Commands to start with: demo, methods, families, info, and generate, which asks a model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rope_extend.cli.arguments import (
    add_base_model,
    add_config_only,
    add_json,
    add_trained_length,
    checkpoint,
    length,
    one_method,
    path,
    quick_imports,
)
from rope_extend.cli.arguments import methods as method_list
from rope_extend.data.sources import read_file
from rope_extend.errors import RopeExtendError
from rope_extend.models.checkpoint_directory import is_adapter
from rope_extend.models.load_choices import ATTENTION, DTYPES, QUANTIZED
from rope_extend.models.locating import check_checkpoint

START_HERE = {
    "yarn": "to fine-tune, and to serve anywhere: every export target can run it",
    "jet_long": "without fine-tuning, in transformers; texts within the trained window are unchanged",
    "dynamic_yarn": "likewise, for families whose attention cannot be changed; its perplexity is higher",
}
"""Methods to try first, with the reason."""


def methods(arguments: argparse.Namespace) -> None:
    """List the position encodings, with their parameters and sources, and the ones to try first."""
    from rope_extend.encodings import encoding_class, encoding_names

    rows: list[dict[str, Any]] = []
    for name in encoding_names():
        cls = encoding_class(name)
        facts = {"parameters": cls.parameters(), "paper": cls.paper, "summary": cls.summary()}
        rows.append({"name": name, "group": _group(cls), **facts})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("start here")
    for name, reason in START_HERE.items():
        print(f"  {name:<16}{reason}")
    for group in dict.fromkeys(row["group"] for row in rows):
        print(f"\n{group}")
        for row in rows:
            if row["group"] == group:
                print(f"  {row['name']}\n      {row['summary']}")
                print(f"      parameters: {', '.join(row['parameters']) or 'none'}; source: {row['paper']}")


def _group(cls: type[Any]) -> str:
    """The heading under which a method is listed."""
    from rope_extend.encodings import ComposedRope, RemapEncoding, RopeEncoding

    groups = {
        RemapEncoding: "RoPE with other positions or frequencies for distant tokens, without training",
        ComposedRope: "RoPE, around another method: `resonance(yarn)`",
        RopeEncoding: "RoPE with other frequencies",
        object: "instead of RoPE: the model must be fine-tuned before it can use them",
    }
    return next(text for base, text in groups.items() if issubclass(cls, base))


def families(arguments: argparse.Namespace) -> None:
    """List the supported model families, by the `model_type` in their config.json."""
    from rope_extend.models.families import family_for, supported_families

    rows = {name: family_for(name).note for name in supported_families()}
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows))
    for name, note in {"model_type": "what RoPE rotates", **rows}.items():
        print(f"{name:<{width}}  {note}")


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_only(parser)
    add_json(parser)


def info(arguments: argparse.Namespace) -> None:
    """Show a checkpoint's position encoding: its windows, base, and channels.

    Only the config is read; no weights are loaded. `advise` says how to reach another window.
    """
    check_checkpoint(arguments.model)  # before torch is imported
    with quick_imports():
        from rope_extend.checkpoint.info import info as inspect_model
        from rope_extend.encodings import critical_range

        model = inspect_model(arguments.model, trained_length=arguments.trained_length)
    shape = model.shape
    if arguments.json:
        print(json.dumps({**asdict(model), "critical_pairs": critical_range(shape)}, indent=2))
        return
    named = {"none": "none (plain RoPE)", None: "unknown to rope_extend"}
    rows = {
        "family": model.model_type,
        "encoding": named.get(model.encoding, model.encoding),
        "rope_parameters": model.rope_parameters,
        "trained window": f"{shape.trained_length} tokens; its config has a window of {model.window}",
        "present window": f"{model.current_length} tokens, with its present encoding",
        "to extend": f"start={model.start}, because {model.start_reason}",
        "RoPE": f"rotates {shape.dim} of {model.head_dim} channels of a head, in pairs; base {shape.theta:g}",
        "slow pairs": f"{model.slow_channels} of {shape.dim // 2}: the last ones, which make no whole turn "
        "within the trained window",
    }
    for name, value in rows.items():
        print(f"{name:<16}{value}")
    if model.record:
        print(f"extended by rope_extend to {model.record['target_length']} tokens")


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "directory of the results (default: demo-output)"
    add("--output", type=path, default="demo-output", metavar="DIR", help=text)
    text = "methods to measure without training (default: none,yarn)"
    add("--methods", type=method_list, metavar="NAME,NAME", help=text)
    text = "methods to fine-tune (default: yarn,short_original(yarn))"
    add("--tune", type=method_list, metavar="NAME,NAME", help=text)
    add("--steps", type=int, metavar="N", help="LoRA steps of each method")
    add("--overwrite", action="store_true", help="start again in a directory that holds results")


def demo(arguments: argparse.Namespace) -> None:
    """Extend the bundled model 8x, and measure perplexity and passkeys before and after a short LoRA run.

    Needs no network and no GPU. After an interruption, the same command resumes.
    """
    from rope_extend.demo.run import METHODS, TUNED, run_demo

    try:
        run_demo(
            arguments.output, methods=arguments.methods or METHODS, tuned=arguments.tune or TUNED,
            steps=arguments.steps, overwrite=arguments.overwrite,
        )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):  # SystemExit: a signal in a run of finetune
        print("\nThe same command resumes from here; leave --overwrite out if you gave it.")
        raise


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=checkpoint, help="a run of finetune, a checkpoint's directory, or a hub id")
    add(
        "--file",
        type=path,
        required=True,
        metavar="FILE",
        help="long text, in UTF-8, also compressed (.gz, .bz2, .xz)",
    )
    add("--ask", metavar="QUESTION", help="question after the text (default: continue the text)")
    text = "longest answer in tokens (default: 200)"
    add("--max-new-tokens", type=length, default=200, metavar="N", help=text)
    text = "longest prompt in tokens (default: the window of the model, less the answer)"
    add("--max-tokens", type=length, metavar="N", help=text)
    text = "extend a checkpoint without training to this window, and answer before and after"
    add("--target-length", type=length, metavar="N", help=text)
    add("--method", type=one_method, metavar="NAME", help="method for that (default: yarn)")
    add_trained_length(parser)
    add_base_model(parser)
    add("--no-before", action="store_true", help="answer only with the extended model")
    add("--no-chat", action="store_true", help="do not use the tokenizer's chat template")
    add = parser.add_argument_group("loading").add_argument
    add("--device", metavar="DEVICE", help="device, such as cuda:1 (default: the GPU, if any)")
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: bfloat16 on a GPU, else float32)")
    text = "attention implementation (default: sdpa)"
    add("--attn", dest="attention", choices=ATTENTION, metavar="NAME", help=text)
    add("--quantize", choices=QUANTIZED, help="quantize the weights on load, by bitsandbytes")


def generate(arguments: argparse.Namespace) -> None:
    """Ask a model about a long text, before and after its extension.

    The answer is the most likely one (greedy), and appears while it is generated. If the tokenizer has a chat
    template, a question uses it. A text that is too long for the window loses its end, and a line says so.
    """
    if not Path(arguments.file).exists():
        raise RopeExtendError(f"no such file: {arguments.file!r} (seen from {Path.cwd()}); check the path")
    text = read_file(Path(arguments.file))
    if not text.strip():
        raise RopeExtendError(f"{arguments.file} is empty; give a file with text")
    check_checkpoint(arguments.model)  # before torch is imported
    if arguments.no_before and arguments.target_length is None and not is_adapter(Path(arguments.model)):
        raise RopeExtendError(
            f"{arguments.model} is not extended here, so --no-before has no answer to leave out; give "
            "--target-length, or leave --no-before out"
        )

    from transformers import AutoTokenizer

    from rope_extend.evaluation.asking import Subjects, answer, long_prompt
    from rope_extend.models.load_options import LoadOptions
    from rope_extend.models.loading import pretrained

    subjects = Subjects.of(
        arguments.model, LoadOptions.of(arguments), base_model=arguments.base_model,
        target_length=arguments.target_length, method=arguments.method,
        trained_length=arguments.trained_length,
    )  # fmt: skip
    tokenizer = pretrained(AutoTokenizer, subjects.tokenizer)
    window = subjects.window - arguments.max_new_tokens
    if window < 1:
        raise RopeExtendError(
            f"an answer of {arguments.max_new_tokens:,} tokens leaves no room in a window of "
            f"{subjects.window:,}; use a smaller --max-new-tokens"
        )
    most = arguments.max_tokens or window
    if most > window:
        raise RopeExtendError(
            f"--max-tokens {most:,} and an answer of {arguments.max_new_tokens:,} exceed the window of "
            f"{subjects.window:,} tokens; use at most {window:,}"
        )
    prompt = long_prompt(tokenizer, text, arguments.ask, most, chat="off" if arguments.no_chat else "auto")
    part = f"the first {prompt.used:,} of " if prompt.used < prompt.total else ""
    total = f"{arguments.file}: {part}{prompt.total:,} tokens"
    print(f"{total}; whole prompt: {len(prompt.ids):,} of at most {most:,} tokens", file=sys.stderr)
    for label, model in subjects.models(before=not arguments.no_before):
        print(f"--- {label}", flush=True)
        show = partial(print, end="", flush=True)
        answer(model, tokenizer, prompt.ids, arguments.max_new_tokens, show)
        print()
