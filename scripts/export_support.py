"""Write docs/export.md: which encoding is exported where, and in which form."""

from __future__ import annotations

from pathlib import Path

from rope_extend.checkpoint.exporting import examples, support_table
from rope_extend.checkpoint.gguf import READS_FACTORS
from rope_extend.encodings import RopeShape

SHAPE, TARGET = RopeShape(dim=8, theta=10_000.0, trained_length=4096), 32_768
PAGE = """\
# Export

<!-- written by scripts/export_support.py -->

    rope-extend export CHECKPOINT --to transformers --output DIRECTORY    # or vllm, or sglang
    rope-extend export CHECKPOINT --to llama.cpp --gguf MODEL.gguf --output DIRECTORY
    rope-extend export CHECKPOINT --support

The result needs no rope_extend where it is read; or there is none, and you are told why. Weights are linked
or copied, never written again; an adapter is merged first; and the export is compared with the original in
another process before it appears (`--no-verify` leaves that out). The last line says what is possible.

For llama.cpp, its own converter comes first: see [llama_cpp.md](llama_cpp.md).

## What each target reads

A model of Llama's shape, trained on {trained:,} tokens and extended to {target:,}; other families can differ.

- **native**: the target has the method, or a simpler one with the same table.
- **exact by factors**: the target reads the table itself, one divisor for each pair of channels.
- **needs rope_extend**: `rope_extend.load` reads it, and nothing else does.
- **impossible**: the target reads no such thing.

{table}

## Good to know

- vLLM and SGLang multiply the window of `linear` by its factor. The export for them states the trained one,
  so that the right one results. `--max-model-len` (vLLM) or `--context-length` (SGLang) makes it smaller.
- vLLM and SGLang do not read `attention_factor` in `longrope`. The export for them says the same as
  `short_mscale` and `long_mscale`, of which transformers warns as unrecognised keys, to no effect.
- llama.cpp reads factors in these architectures: {names}. In others there are the native forms, and YaRN with
  its usual ramp.
- What is said of a target was read in its source; `rope_extend/checkpoint/exporting.py` and `gguf.py` name
  the files. transformers and llama.cpp were run on exports; vLLM and SGLang were not.
"""


def page() -> str:
    """The whole page."""
    table = support_table(list(examples(SHAPE, TARGET)), SHAPE, target_length=TARGET)
    names = ", ".join(sorted(READS_FACTORS))
    return PAGE.format(trained=SHAPE.trained_length, target=TARGET, table=table, names=names)


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "export.md").write_text(page(), encoding="utf-8")
