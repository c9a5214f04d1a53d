"""Write docs/cookbook.md: the recipes that come with the package, by family.

python scripts/write_cookbook.py
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from rope_extend.advice.shipped import ShippedRecipe, shipped_path, shipped_recipes
from rope_extend.units import format_length, parse_length

PAGE = Path(__file__).parent.parent / "docs" / "cookbook.md"
FAMILIES = {
    "meta-llama": "Llama",
    "huggyllama": "Llama",
    "TinyLlama": "TinyLlama",
    "HuggingFaceTB": "SmolLM2",
    "Qwen": "Qwen",
    "mistralai": "Mistral",
    "google": "Gemma",
    "microsoft": "Phi",
}
"""The heading of a recipe, by the owner of its model on the hub."""
LEAD = """# Cookbook

A recipe for each family, ready to run. Memory is estimated by `finetune --plan` and not measured. Copy a
recipe to change it, or to use it for another model of the same family, such as the Instruct version:

```bash
rope-extend recipes
rope-extend recipes copy qwen3_1.7b_128k_yarn --model path/to/qwen3 --output runs/cookbook.yaml --overwrite
```

For every other model and window, `rope-extend advise MODEL --target-length 32k --output recipe.yaml` writes
one. [choose.md](choose.md) explains its answers, and [families.md](families.md) lists all supported families.

**Instruct models.** The chat template is kept, because `merge` and `export` copy the tokenizer. Books contain
no chats, so mix some chats into `data`, and measure the model's usual tasks afterwards.

**Afterwards**, for each recipe: `rope-extend evaluate` and `rope-extend retrieve` on texts that were not
trained on, `rope-extend generate` for a question of your own, and `rope-extend export` for the engine that
serves it.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print("written:", PAGE)


def page() -> str:
    """The page in Markdown."""
    families: defaultdict[str, list[ShippedRecipe]] = defaultdict(list)
    for recipe in shipped_recipes():
        families[FAMILIES[recipe.model.partition("/")[0]]].append(recipe)
    parts = [LEAD]
    for family in dict.fromkeys(FAMILIES.values()):
        parts.append(f"## {family}\n")
        parts += [_recipe(recipe) for recipe in families[family]]
    return "\n".join(parts)


def _recipe(recipe: ShippedRecipe) -> str:
    values: dict[str, Any] = yaml.safe_load(shipped_path(recipe.name).read_text(encoding="utf-8"))
    length = format_length(parse_length(str(values["target_length"])))
    block = values.get("block_length")
    steps, each = values["steps"], values.get("batch_size", 1) * values.get("gradient_accumulation", 1)
    tokens = steps * each * parse_length(str(block or values["target_length"]))
    lines = [
        f"### {recipe.name}\n",
        f"{recipe.title}\n",
        "| | |",
        "|---|---|",
        f"| model | `{recipe.model}` |",
        f"| window | {length} |",
        f"| method | `{values['method']}` |",
        f"| training | {steps} steps, {tokens / 1e6:,.0f} million tokens |",
        *(f"| on {size} GB | {text.rstrip('.')} |" for size, text in recipe.memory.items()),
        "",
        "```bash",
        f"rope-extend finetune {recipe.name} --plan --limit-memory 24GB",
        f"rope-extend finetune {recipe.name} --data path/to/long/documents",
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
