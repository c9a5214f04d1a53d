"""Commands that show what is available: demo, methods, families, info, doctor."""

from __future__ import annotations

import argparse
import json
from shlex import quote
from typing import Any

from rope_extend.cli.arguments import add_trained_length, checkpoint, length, path
from rope_extend.cli.arguments import methods as method_list
from rope_extend.models.locating import check_checkpoint

START_HERE = {
    "yarn": "the best first choice, with or without fine-tuning; every export target can run it",
    "dynamic_yarn": "without fine-tuning, for texts of very different lengths; short texts are unchanged",
    "short_original": "around another method, `short_original(yarn)`: the same, with a fixed long table",
}
"""Methods to try first, with the reason."""


def methods_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `methods`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tables", action="store_true",
        help="list the published tables of divisors, which longrope takes by name",
    )  # fmt: skip


def methods(arguments: argparse.Namespace) -> None:
    """List the position encodings, with their parameters and sources, and the ones to try first."""
    from rope_extend.encodings import encoding_class, encoding_names

    if arguments.tables:
        _tables(arguments.json)
        return
    classes = {name: encoding_class(name) for name in encoding_names()}
    if arguments.json:
        rows = [
            {
                "name": name,
                "group": _group(cls),
                "parameters": cls.parameters(),
                "depends_on_length": _depends_on_length(cls),
                "paper": cls.paper,
                "summary": cls.summary(),
            }
            for name, cls in classes.items()
        ]
        print(json.dumps(rows, indent=2))
        return
    print("start here")
    for name, reason in START_HERE.items():
        print(f"  {name:<16}{reason}")
    for group in dict.fromkeys(map(_group, classes.values())):
        print(f"\n{group}")
        for name, cls in classes.items():
            if _group(cls) == group:
                print(f"  {name}\n      {cls.summary()}")
                print(f"      parameters: {', '.join(cls.parameters()) or 'none'}; source: {cls.paper}")


def _tables(as_json: bool) -> None:
    """Print the published tables of divisors."""
    from dataclasses import asdict

    from rope_extend.encodings.core.published_tables import PUBLISHED_TABLES
    from rope_extend.units import format_length

    if as_json:
        print(json.dumps([asdict(table) for table in PUBLISHED_TABLES.values()], indent=2))
        return
    for table in PUBLISHED_TABLES.values():
        divisors = table.divisors
        window = format_length(table.target_length)
        print(f"{table.name}: {table.parameter} of {table.model} for {window}, texts up to "
              f"{format_length(table.length)}")  # fmt: skip
        print(f"      divisors {divisors[0]:g} ... {divisors[-1]:g}, {len(divisors)} pairs; {table.source}, "
              f"{table.licence}")  # fmt: skip
        if table.note:
            print(f"      note: {table.note}")
    print("\nUse one: --method longrope --method-parameters long_factor=NAME,short_factor=NAME")


def _group(cls: type[Any]) -> str:
    """The heading under which a method is listed."""
    from rope_extend.encodings import ComposedRope, RemapEncoding, RopeEncoding

    if not issubclass(cls, RopeEncoding):
        return "instead of RoPE: the model must be fine-tuned before it can use them"
    if issubclass(cls, RemapEncoding):
        return "RoPE with other positions or frequencies for distant tokens, without training"
    if issubclass(cls, ComposedRope):
        return "RoPE, around another method: `resonance(yarn)`"
    return "RoPE with other frequencies"


def _depends_on_length(cls: type[Any]) -> bool:
    """Whether the table of a method changes with the length; of a composed method, the outer part alone."""
    value = getattr(cls, "depends_on_length", False)
    if isinstance(value, bool):
        return value
    return not cls.required() and bool(cls().depends_on_length)


def families_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `families`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def families(arguments: argparse.Namespace) -> None:
    """List the supported model families, by the `model_type` in their config.json."""
    from rope_extend.models.families import adapter_for, supported_families

    rows = {name: adapter_for(name).note for name in supported_families()}
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows))
    print(f"{'model_type':<{width}}  what RoPE rotates")
    for name, note in rows.items():
        print(f"{name:<{width}}  {note}")


def info_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `info`."""
    parser.add_argument(
        "model", type=checkpoint, help="directory or hub id of a checkpoint; only its config is read"
    )
    parser.add_argument(
        "--target-length",
        type=length,
        metavar="N",
        help="new window, such as 32k (default: 8x the trained one)",
    )
    add_trained_length(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def info(arguments: argparse.Namespace) -> None:
    """Show a checkpoint's position encoding, and compare the methods that could extend it.

    Only the config is read; no weights are loaded. The columns of the table:
      resolution  highest frequency / highest frequency in training; 1/8 squeezes 8 positions into one
      kept        share of channel pairs whose frequency does not change
      unseen      largest angle at the target / largest angle in training, over the slow channels;
                  above 1.00 the model meets angles that it has never seen
      attention   factor on cos and sin
      stock       `rope_type` under which stock transformers loads the method
    """
    from dataclasses import asdict

    check_checkpoint(arguments.model)  # before torch is imported

    from rope_extend.checkpoint.info import info as inspect_model
    from rope_extend.encodings import critical_range
    from rope_extend.units import format_length

    model = inspect_model(arguments.model, trained_length=arguments.trained_length)
    target = arguments.target_length or 8 * model.shape.trained_length
    effects = model.effects(target)
    if arguments.json:
        rows = [asdict(effect) for effect in effects]
        values = {**model.to_dict(), "critical_pairs": critical_range(model.shape), "target_length": target}
        print(json.dumps({**values, "effects": rows}, indent=2))
        return
    shape = model.shape
    print(f"family          {model.model_type}")
    print(f"encoding        {model.encoding or 'unknown to rope_extend'}")
    print(f"rope_parameters {model.rope_parameters}")
    print(f"trained window  {shape.trained_length} tokens; the config claims {model.window}")
    print(f"present window  {model.current_length} tokens, under its present table")
    print(f"start           {model.start}: {model.start_reason}")
    print(f"rotated         {shape.dim} of {model.head_dim} channels per head, base {shape.theta:g}")
    print(
        f"slow channels   {model.slow_channels} of {shape.dim // 2} pairs never completed a turn in training"
    )
    if shape.dim >= 4:
        first, last = critical_range(shape)
        print(f"critical pair   {last} in theory; LongRoPE2 searches from {first} to {last}")
    if model.dual_chunk:
        print("dual chunk      the config has dual_chunk_attention_config; stock transformers ignores it")
    if model.record:
        print(f"extended by rope_extend to {model.record['target_length']} tokens")
    print(f"\nat {format_length(target)} tokens, {target / shape.trained_length:g}x the trained window:")
    width = max(len(effect.encoding) for effect in effects)
    print(f"{'method':<{width}}  resolution  kept  unseen  attention  stock")
    for effect in effects:
        print(
            f"{effect.encoding:<{width}}  {effect.resolution:>10.3f}  {effect.kept:>4.0%}  "
            f"{effect.unseen:>6.2f}  {effect.attention_factor:>9.3f}  {effect.native or 'no'}"
        )
    print(
        f"\nUse yarn: rope-extend finetune --model {quote(arguments.model)} --method yarn "
        f"--target-length {format_length(target)} ...\n"
        "Without fine-tuning, dynamic_yarn leaves texts within the trained window unchanged."
    )


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    parser.add_argument(
        "--output",
        type=path,
        default="demo-output",
        metavar="DIR",
        help="directory of the results (default: demo-output)",
    )
    parser.add_argument(
        "--methods", type=method_list, metavar="NAME,NAME",
        help="methods to measure without training (default: none,yarn)",
    )  # fmt: skip
    parser.add_argument(
        "--tune", type=method_list, metavar="NAME,NAME",
        help="methods to fine-tune (default: yarn,short_original(yarn))",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="N", help="LoRA steps of each method")
    parser.add_argument(
        "--overwrite", action="store_true", help="start again in a directory that holds results"
    )


def demo(arguments: argparse.Namespace) -> None:
    """Extend the bundled model 8x, and measure perplexity and passkeys before and after a short LoRA run.

    Needs no network and no GPU. After an interruption, the same command resumes.
    """
    from rope_extend.demo.run import METHODS, TUNED, run_demo

    try:
        run_demo(
            arguments.output,
            methods=arguments.methods or METHODS,
            tuned=arguments.tune or TUNED,
            steps=arguments.steps,
            overwrite=arguments.overwrite,
        )
    except (KeyboardInterrupt, SystemExit):  # SystemExit: a signal in a run of finetune
        print("\nThe same command resumes from here; leave --overwrite out if you gave it.")
        raise


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor(arguments: argparse.Namespace) -> None:
    """Check this machine: versions, devices, bfloat16, attention backends, optional packages and disk.

    A line that starts with `!` says what to do. Nothing is downloaded. Add the output to a bug report.
    """
    from rope_extend.report.machine import examine

    findings = examine()
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return
    for finding in findings:
        print(f"{'!' if finding.advice else ' '} {finding.subject:<16}{finding.result}")
        if finding.advice:
            print(f"  {'':<16}-> {finding.advice}")
