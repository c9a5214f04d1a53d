"""Write docs/families.md: every family with a rotary module, and how it is patched.

python tools/write_families.py
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rope_extend.models.families import REFUSED, Family, family_for, supported_families

PAGE = """# Model families

The `model_type` in a checkpoint's `config.json` is its family. This is every family of causal language
models in transformers that has a rotary module: {supported} are supported, {refused} are not. If a model has
several rotary tables, only those in the last column are changed.

| families | what is rotated | which tables |
|-|-|-|
{families}

## Static methods only

Static methods, such as `yarn`, work in every supported family. Encodings that act inside attention, such as
biases and methods that follow the length, do not work in these:

| families | why |
|-|-|
{static}

## Not supported

| families | why |
|-|-|
{reasons}

`python tools/write_families.py` writes this page.
"""


def tables(family: Family) -> str:
    """Which tables of a family are extended."""
    where = f"`{family.rotary_path}`"
    kinds = " or ".join(f"`{kind}`" for kind in family.layer_types)
    return f"{where}, of {kinds} layers" if kinds else where


def rows(families: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """Rows of a table, the longest first: families with the same cells share one."""
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, cells in families:
        alike[cells].append(name)
    ordered = sorted(alike.items(), key=lambda row: len(row[1]), reverse=True)
    return "\n".join(f"| {' | '.join((', '.join(names), *cells))} |" for cells, names in ordered)


def page() -> str:
    """The whole page."""
    families = {name: family_for(name) for name in sorted(supported_families())}
    return PAGE.format(
        supported=len(families),
        refused=len(REFUSED),
        families=rows((name, (each.note, tables(each))) for name, each in families.items()),
        static=rows((name, (each.unreachable,)) for name, each in families.items() if each.unreachable),
        reasons=rows((name, (reason,)) for name, reason in sorted(REFUSED.items())),
    )


if __name__ == "__main__":
    path = Path(__file__).parent.parent / "docs" / "families.md"
    path.write_text(page(), encoding="utf-8")
    print(path)
