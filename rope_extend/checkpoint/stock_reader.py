"""Computes logits of checkpoints in a process of its own; `verify` runs it as a script.

Without `plugin`, rope_extend cannot be imported here: the logits are those of stock transformers alone. So
this file imports nothing from its own package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NoReturn


class Barred(MetaPathFinder):
    """Makes `import rope_extend` fail, however it is installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Refuse this package and leave others to the next finder."""
        if name.partition(".")[0] == "rope_extend":
            raise ImportError("rope_extend is barred from this process")


def bar() -> None:
    """Bar rope_extend, and check that it is barred."""
    sys.meta_path.insert(0, Barred())
    try:
        import_module("rope_extend")
    except ImportError:
        return
    fail("rope_extend could be imported in a process that must not have it")


def fail(message: str) -> NoReturn:
    """End the process with a message."""
    sys.exit(message)


def main(request: dict[str, Any]) -> None:
    """Write the logits of each checkpoint in the request, or the error on loading it."""
    if not request["plugin"]:
        bar()
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(request["threads"])
    inputs = load_file(request["inputs"])
    answers: list[dict[str, str | None]] = []
    for item in request["checkpoints"]:
        try:
            model: Any
            if request["plugin"]:
                from rope_extend.checkpoint.restoring import load

                model = load(item["directory"], base_model=item["base_model"], dtype=torch.float32)
            else:
                model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                    item["directory"],
                    dtype=torch.float32,
                    trust_remote_code=False,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
                initialised = sorted(map(str, (*loaded["missing_keys"], *loaded["mismatched_keys"])))
                if initialised:
                    raise ValueError(f"the files have no weights for {initialised[0]}")
        except Exception as error:  # any error is the answer
            answers.append({"error": f"{type(error).__name__}: {error}".strip()})
            continue
        with torch.inference_mode():
            logits = {
                name.removeprefix("ids."): model.eval()(
                    input_ids=ids,
                    position_ids=inputs["positions." + name.removeprefix("ids.")],
                    attention_mask=torch.ones_like(ids),
                    use_cache=False,
                ).logits[0].float().contiguous()
                for name, ids in inputs.items()
                if name.startswith("ids.")
            }  # fmt: skip
        save_file(logits, item["output"])
        answers.append({"error": None})
    barred = "rope_extend" not in sys.modules
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    Path(request["answer"]).write_text(
        json.dumps({"checkpoints": answers, "without_rope_extend": barred, "versions": versions})
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
