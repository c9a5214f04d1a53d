"""Write docs/export.md: which encoding is exported where, and in which form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rope_extend.checkpoint.export.gguf import READS_FACTORS
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, encoding_names, method_named

SHAPE, TARGET = RopeShape(dim=8, theta=10_000.0, trained_length=4096), 32_768
PAGE = """\
# Export

<!-- written by tools/write_export_support.py -->

    rope-extend export CHECKPOINT --to transformers --output DIRECTORY    # or vllm, or sglang
    rope-extend export CHECKPOINT --to llama.cpp --gguf MODEL.gguf --output DIRECTORY
    rope-extend export CHECKPOINT --support

In Python, `rx.export(model, output, to="vllm")` exports a patched model, or the checkpoint in a directory.

The exported model runs without rope_extend. If that is impossible, nothing is written and you are told why.
The last command prints what is possible.

- Weights are linked or copied, never written again.
- An adapter is merged first. For llama.cpp, merge it yourself, before you convert the weights.
- The export is compared with the original in another process before it appears. `--no-verify` skips this.

For llama.cpp, run its own converter first: see [llama_cpp.md](llama_cpp.md).

In short: `yarn`, `linear`, `ntk`, `abf`, `llama3` and most other static methods can be exported to all four
targets. Methods that follow the length, or act inside attention, need rope_extend.

## What each target supports

For a model of Llama's shape, trained on {trained:,} tokens and extended to {target:,}. Other families can
differ.

- **native**: the target has the method, or a simpler one with the same table.
- **exact by factors**: the target takes the table itself, one divisor for each pair of channels.
- **needs rope_extend**: only `rope_extend.load` loads it.
- **impossible**: the target has nothing that could express it.

{table}

## Good to know

- vLLM and SGLang multiply the window of `linear` by its factor. The export for them states the trained
  window, so that the result is right. `--max-model-len` (vLLM) or `--context-length` (SGLang) makes it
  smaller.
- vLLM and SGLang ignore `attention_factor` in `longrope`. The export for them gives the same number as
  `short_mscale` and `long_mscale`. transformers warns that it does not know these keys, and ignores them.
- llama.cpp supports factors in these architectures: {names}. In others it has the native forms, and YaRN
  with its usual ramp.
- The statements about a target come from its source; `rope_extend/checkpoint/export/targets.py` and `gguf.py`
  name the files. Exports were run with transformers and llama.cpp. They were not run with vLLM and SGLang.
"""


_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dynamic_ntk", {"per": "row"}),
    ("yarn", {"attention_scale": 1.25}),
    ("yarn", {"beta_fast": 16.0, "truncate": False}),
    ("yarn", {"ramp": "turns"}),
    ("longrope", {"per": "row"}),
    ("longrope", {"short": True}),
    ("longrope", {"start_tokens": 4}),
    ("resonance(yarn)", {}),
    ("logn(ntk)", {}),
    ("short_original(yarn)", {}),
)
"""Parameters or inner methods that change the verdict; the table shows them in addition to all defaults."""


def examples(shape: RopeShape, target_length: int) -> Iterator[Encoding]:
    """Every method for a target length, rotary methods first, and the variants with other verdicts."""
    rotary = encoding_names(RopeEncoding)
    for name, parameters in sorted([*((name, {}) for name in rotary), *_VARIANTS], key=lambda row: row[0]):
        options = dict(parameters)
        if name == "longrope":
            options["long_factor"] = [1.0 + i for i in range(shape.dim // 2)]
            if options.pop("short", False):
                options["short_factor"] = options["long_factor"]
        length = target_length
        if name == "string":  # its reach is less than twice the trained window
            length = min(length, 3 * shape.trained_length // 2)
        yield method_named(name).for_target(shape, length, **options)
    for name in encoding_names():
        if name not in rotary:
            yield method_named(name).for_target(shape, target_length)


def support_table(rows: Sequence[Encoding], shape: RopeShape, target_length: int) -> str:
    """A Markdown table of encodings and targets, with the reasons numbered below it."""
    reasons: dict[str, int] = {}
    lines = [f"| encoding | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
    for encoding in rows:
        cells = []
        for target in TARGETS:
            cell = support(encoding, shape, target, target_length=target_length)
            cells.append(f"{cell.verdict} ({reasons.setdefault(cell.reason, len(reasons) + 1)})")
        lines.append(f"| `{encoding}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())])


def page() -> str:
    """The whole page."""
    table = support_table(list(examples(SHAPE, TARGET)), SHAPE, TARGET)
    names = ", ".join(sorted(READS_FACTORS))
    return PAGE.format(trained=SHAPE.trained_length, target=TARGET, table=table, names=names)


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "export.md").write_text(page(), encoding="utf-8")
