"""The commands that ship a result: convert, merge, verify, card, push and export."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.arguments import (
    add_base_model,
    add_json,
    add_output,
    checkpoint,
    export_target,
    path,
    size,
)
from rope_extend.errors import RopeExtendError
from rope_extend.models.load_choices import DTYPES
from rope_extend.models.locating import check_checkpoint


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("adapter", type=checkpoint, help="directory or hub id of a LoRA adapter with its rope_extend.json")
    add_output(parser, "DIR", "directory of the merged checkpoint", required=True)
    add_base_model(parser)
    text = "branch, tag or commit of the base checkpoint (default: the recorded one)"
    add("--base-revision", metavar="REVISION", help=text)
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: that of the base model)")
    text = "maximum size of one weight file (default: 5GB)"
    add("--max-shard-size", type=size, default="5GB", metavar="SIZE", help=text)


def merge(arguments: argparse.Namespace) -> None:
    """Merge a LoRA adapter into its base model, exactly.

    Weights that the adapter changes are computed in float32 and rounded once. All other weights are the base
    model's own, bit for bit.
    """
    check_checkpoint(arguments.adapter)  # before torch is imported

    import torch

    from rope_extend.checkpoint.merging import merge as run
    from rope_extend.checkpoint.record import read_record
    from rope_extend.models.loading import is_for_stock

    path = run(
        arguments.adapter, arguments.output, base_model=arguments.base_model,
        base_revision=arguments.base_revision, overwrite=arguments.overwrite,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        max_shard_size=arguments.max_shard_size,
    )  # fmt: skip
    print("written:", path)
    record = read_record(path)
    if is_for_stock(path, record.target_length):
        print(f"verify it: rope-extend verify {quote(str(path))}")
    else:
        print(f"load it with rope_extend.load: stock transformers does not compute {record.encoding}")


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=checkpoint, help="a GGUF file, or a directory with one")
    add_output(parser, "DIR", "directory of the checkpoint", required=True)
    text = "dtype of the weights (default: float32, which holds the dequantised values exactly)"
    add("--dtype", choices=DTYPES, default="float32", help=text)


def convert(arguments: argparse.Namespace) -> None:
    """Write a GGUF file as an ordinary checkpoint of transformers.

    Other commands take a GGUF file as it is. A checkpoint is needed to merge an adapter into the model, to
    load it in 4 bits, and for other tools.
    """
    import torch

    from rope_extend.checkpoint.converting import convert as run

    path = run(
        arguments.model,
        arguments.output,
        dtype=getattr(torch, arguments.dtype),
        overwrite=arguments.overwrite,
    )
    print("written:", path)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=checkpoint, help="a checkpoint with its rope_extend.json")
    add_base_model(parser)
    text = "checkpoint to compare with, such as the adapter before the merge (default: the same one)"
    add("--reference", type=checkpoint, metavar="DIR", help=text)
    text = "allowed difference of a logit (default: 1e-4)"
    add("--tolerance", type=float, default=1e-4, metavar="X", help=text)
    add_json(parser)


def verify(arguments: argparse.Namespace) -> None:
    """Check that stock transformers, in a process without rope_extend, computes the right logits.

    Compares logits inside and beyond the pretrained window, and fails if they differ, or if there is nothing
    to compare: a checkpoint that needs rope_extend needs a --reference.
    """
    from rope_extend.checkpoint.verifying import verify as run

    verification = run(
        arguments.directory, base_model=arguments.base_model, reference=arguments.reference,
        tolerance=arguments.tolerance,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(asdict(verification), indent=2))
        verification.check()
        return
    for where, gap in (("inside", verification.inside), ("beyond", verification.beyond)):
        if gap is not None:
            print(f"largest difference of a logit {where} the pretrained window: {gap:.2g}")
    print(verification.check())


def _card_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=checkpoint, help="an adapter or a full checkpoint, with its rope_extend.json")
    text = "results.jsonl of an evaluation, or its directory"
    add("--results", type=path, metavar="FILE", help=text)
    add("--data", action="append", metavar="SOURCE", help="training data to name on the card")
    add("--name", help="name in the card's code, such as the hub id")


def card(arguments: argparse.Namespace) -> None:
    """Write the model card: method, windows, perplexity, limits, and the code that loads the model correctly.

    A README.md that somebody else wrote or edited is not replaced.
    """
    from rope_extend.checkpoint.card import write_card
    from rope_extend.models.checkpoint_directory import CARD_NAME

    results: dict[str, Any] = {}
    if arguments.results is not None:
        from rope_extend.evaluation.report_files import card_results, read_results

        results = card_results(read_results(Path(arguments.results)))
    path = write_card(arguments.directory, data=arguments.data, name=arguments.name, **results)
    if path is None:
        raise RopeExtendError(
            f"{Path(arguments.directory) / CARD_NAME} was written or edited by somebody else; move it away "
            "first"
        )
    print("written:", path)


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=checkpoint, help="an adapter or a full checkpoint")
    add("name", help="hub id, owner/name; the repository is created if it is missing")
    add("--private", action="store_true", help="make a new repository private; a public one is refused")
    add("--revision", metavar="BRANCH", help="branch (default: the main one)")


def push(arguments: argparse.Namespace) -> None:
    """Upload a checkpoint to the Hugging Face hub: weights, configs, tokenizer, record and card.

    All other files stay here and are named, such as the recipe, the log and the checkpoints of a run. Log in
    first: hf auth login.
    """
    from rope_extend.checkpoint.publishing import push_to_hub

    address = push_to_hub(
        arguments.directory, arguments.name, private=arguments.private or None, revision=arguments.revision
    )
    print("written:", address)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=checkpoint, help="an adapter, merged first but for llama.cpp, or a full checkpoint")
    text = f"{', '.join(TARGETS)} (default: transformers)"
    add("--to", type=export_target, default="transformers", metavar="TARGET", help=text)
    add_output(parser, "DIR", "directory of the export")
    text = "for llama.cpp: the weights, converted by its convert_hf_to_gguf.py"
    add("--gguf", type=path, metavar="FILE", help=text)
    add_base_model(parser)
    add("--no-verify", action="store_true", help="do not compare the logits with the original")
    text = "print how each target supports the checkpoint's encoding, and write nothing"
    add("--support", action="store_true", help=text)


def export(arguments: argparse.Namespace) -> None:
    """Write a checkpoint in the form that transformers, vLLM, SGLang or llama.cpp reads, or say why not.

    The export does not need rope_extend. It is compared with the original before it appears.
    """
    if not arguments.support:
        if arguments.output is None:
            raise RopeExtendError("export needs --output, or --support")
        from rope_extend.checkpoint.exporting import export as run

        path = run(
            arguments.directory, arguments.output, arguments.to, overwrite=arguments.overwrite,
            verify=not arguments.no_verify, base_model=arguments.base_model, gguf=arguments.gguf,
        )  # fmt: skip
        print("written:", path)
        return
    from rope_extend.checkpoint.export.support import support
    from rope_extend.checkpoint.record import read_record

    record = read_record(arguments.directory)
    print(record.encoding)
    for target in TARGETS:
        found = support(
            record.encoding, record.shape, target, record.model_type, target_length=record.target_length
        )
        print(f"{target:<14}{found.verdict}: {found.reason}")
