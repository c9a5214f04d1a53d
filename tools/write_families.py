"""Write docs/families.md: every family with a rotary module, and how it is patched.

python tools/write_families.py
"""

from pathlib import Path

from rope_extend.models.families import REFUSED, Family, family_for, supported_families

HEAD = """# Model families

The `model_type` in a checkpoint's `config.json` is its family. This is every family of causal language
models in transformers that has a rotary module: %d are supported, %d are not.

- **Which tables**: if a model has several rotary tables, only those listed are changed.
- **By length**: whether encodings that act inside attention can be patched in. Examples are biases and
  methods that follow the length. Static methods, such as `yarn`, work in every supported family.

This page is written by `python tools/write_families.py`.

| family | supported | what is rotated | which tables | by length |
|-|-|-|-|-|
"""


def tables(family: Family) -> str:
    """Which tables of a family are extended."""
    where = f"`{family.rotary_path}`"
    kinds = " or ".join(f"`{kind}`" for kind in family.layer_types)
    return f"{where}, of {kinds} layers" if kinds else where


def row(model_type: str) -> str:
    """A family's row of the table."""
    if model_type in REFUSED:
        return f"| {model_type} | no | {REFUSED[model_type]} | | |\n"
    family = family_for(model_type)
    by_length = f"no: {family.unreachable}" if family.unreachable else "yes"
    return f"| {model_type} | yes | {family.note} | {tables(family)} | {by_length} |\n"


def page() -> str:
    """The whole page."""
    supported = supported_families()
    rows = [row(family) for family in sorted([*supported, *REFUSED])]
    return HEAD % (len(supported), len(REFUSED)) + "".join(rows)


if __name__ == "__main__":
    path = Path(__file__).parent.parent / "docs" / "families.md"
    path.write_text(page(), encoding="utf-8")
    print(path)
