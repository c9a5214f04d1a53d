"""Computes logits of a checkpoint in a process of its own; `verify` runs it as a script.

rope_extend cannot be imported there: the logits are those of stock transformers alone. So this file imports
nothing from its own package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Inputs = Mapping[str, Any]
"""Token ids and positions `[2, T]` of each tested piece of text, by name."""


def bar() -> None:
    """Make `import rope_extend` fail, however it is installed."""
    sys.modules["rope_extend"] = None  # type: ignore[assignment]


def logits(model: Any, inputs: Inputs) -> dict[str, Any]:
    """Logits `[T, vocabulary]` float32 of each piece of text."""
    import torch

    with torch.inference_mode():
        return {
            name: model(
                input_ids=ids[None].long(),
                position_ids=positions[None],
                # Without a mask, transformers treats positions with gaps as packed texts.
                attention_mask=torch.ones_like(ids[None]).long(),
                use_cache=False,
            ).logits[0].float().contiguous()
            for name, (ids, positions) in inputs.items()
        }  # fmt: skip


def main(directory: str, work: Path, threads: int) -> None:
    """Write the logits of the inputs in `work`, or the error on loading the checkpoint as `error`."""
    bar()
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        if initialised := sorted(map(str, (*loaded["missing_keys"], *loaded["mismatched_keys"]))):
            raise ValueError(f"the files have no weights for {initialised[0]}")
    except Exception as raised:  # any error is the answer
        reason = f"{type(raised).__name__}: {raised}".strip()
        (work / "error").write_text(reason, encoding="utf-8", errors="backslashreplace")
        return
    save_file(logits(model.eval(), load_file(work / "inputs")), work / "logits")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
