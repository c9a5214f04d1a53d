"""The model card: what a checkpoint is, how it was made and measured, and the code that loads it correctly.

The wrong code does not fail: it silently loads the model with the original window. So the card only shows
code that works for this encoding in this form. If there is none, the card says why.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from transformers import AutoConfig

from rope_extend.checkpoint.card_mark import CARD_NAME, is_our_card, marked
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.guard import has_stock_config
from rope_extend.checkpoint.manifest import RECORD_NAME, read_json
from rope_extend.checkpoint.model_type import MODEL_TYPE
from rope_extend.checkpoint.record import Record, read_record
from rope_extend.encodings import RopeEncoding
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, sha256, write_text
from rope_extend.models.gguf_checkpoint import CONVERT, gguf_file
from rope_extend.models.loading import empty_model, pretrained
from rope_extend.models.locating import GGUF
from rope_extend.models.view import rotary_part
from rope_extend.patching import patch_model
from rope_extend.report.tables import is_private, markdown_table, number, public_name
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

PICTURE_NAME = "perplexity.png"
_PICTURE = f"![Perplexity against length]({PICTURE_NAME})"
_MOST_NAMES = 20
"""Number of data sources that the card names."""
_CONVERTED = "converted"
"""The checkpoint that is written of a GGUF file, where a line of code cannot take the file itself."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(
    directory: str | PathLike[str],
    *,
    results: str | None = None,
    data: str | Sequence[str] | None = None,
    perplexity: Mapping[int, float] | None = None,
    before: Mapping[int, float] | None = None,
    trained_in: str | PathLike[str] | None = None,
    name: str | None = None,
    trained_on: int = 0,
    picture: bool = True,
) -> str:
    """The text of a checkpoint's card, Markdown with the hub's front matter.

    The license is left to the publisher of the model.

    Args:
        directory: an adapter or a full checkpoint, with its record.
        results: the Markdown table of an evaluation.
        data: the training data; default: the data of the run's recipe.
        perplexity: perplexity after training by length in tokens, if there are no `results`.
        before: the same before training.
        trained_in: directory of the run, with `recipe.yaml`; default: `directory`.
        name: the checkpoint's name in the code of the card; default: its directory's name, so that the code
            works from the parent directory.
        trained_on: number of documents of `perplexity` that are also training data.
        picture: whether a picture of the `results` is next to the card.

    Raises:
        RopeExtendError: the record is missing or damaged.
    """
    directory = Path(expand_home(directory))
    record = read_record(directory)
    adapter = (directory / "adapter_config.json").exists()
    name = name or directory.resolve().name
    title = " ".join(name.split())
    window = format_length(record.target_length)
    parts = [
        _front_matter(record, adapter),
        f"# {title}",
        _warning(record) if adapter else "",
        f"{'A LoRA adapter' if adapter else 'A checkpoint'} with a context window of {window} tokens, for a "
        f"{record.model_type} model that was pretrained with {format_length(record.shape.trained_length)}.",
        _facts(record, _recipe(Path(trained_in or directory)), data),
        "## Perplexity",
        _measured(results, perplexity, before, trained_on, picture),
        "## Loading",
        f"`{title}` is the path of this directory from its parent; replace it by your path or hub id.",
        *(_adapter_lines(record, name) if adapter else _checkpoint_lines(directory, record, name)),
        "## Limits",
        "\n".join(f"- {limit}" for limit in _limits(directory, record, bool(results or perplexity))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_card(
    directory: str | PathLike[str], *, draw: Callable[[Path], object] | None = None, **options: Any
) -> Path | None:
    """Write `README.md`, and the picture if there is one; returns the card's path.

    A `README.md` that somebody else wrote or edited stays; the return value is then None. So does a picture
    that is not the one of our card; the card then has none.

    Args:
        directory: an adapter or a full checkpoint, with its record.
        draw: writes the picture of the results into the file whose path it is given.
        options: keyword arguments of `model_card`.

    Raises:
        RopeExtendError: as `model_card`, or the file cannot be written.
    """
    path = Path(expand_home(directory)) / CARD_NAME
    picture = path.with_name(PICTURE_NAME)
    try:
        ours = is_our_card(path)
        if os.path.lexists(path) and not ours:
            logger.info("%s was written or edited by somebody else; it is not replaced", path)
            return None
        free = not os.path.lexists(picture) or (ours and _PICTURE in path.read_text(encoding="utf-8"))
        text = model_card(directory, picture=free, **options)
        if draw is not None and free:
            draw(picture)
        elif draw is not None:
            logger.warning("%s is not replaced: it is not the picture of a card of ours", picture)
        write_text(path, marked(text))
    except OSError as error:
        raise RopeExtendError(f"cannot write {path}: {error}") from error
    return path


def add_card(directory: str | PathLike[str], **options: Any) -> None:
    """`write_card` after the work is done: an error is logged, not raised."""
    try:
        write_card(directory, **options)
    except RopeExtendError as error:
        logger.warning("no model card: %s", error)
    except Exception as error:  # the model is worth more than its card
        logger.warning("no model card: %r", error)


def _front_matter(record: Record, adapter: bool) -> str:
    data: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rope_extend", "long-context", record.encoding.name, *(["lora"] if adapter else [])],
    }
    if _is_hub_id(record.base_model):
        data = {"base_model": record.base_model, **data}
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return f"---\n{text}# license: state your own; the base model's license may apply\n---"


def _is_hub_id(name: str | None) -> bool:
    return (
        name is not None
        and _HUB_ID.fullmatch(name) is not None
        and not (Path(name).exists() or _is_gguf(name))
    )


def _is_gguf(name: str | None) -> bool:
    """Whether a base model is a GGUF file, which need not be on this machine."""
    return name is not None and (name.lower().endswith(GGUF) or gguf_file(name) is not None)


def _warning(record: Record) -> str:
    return (
        "> **Warning.** Stock `PeftModel.from_pretrained` loads this adapter and **silently ignores its "
        f"position encoding**. The model then has its original window of {record.shape.trained_length} "
        "tokens, with weights that were trained for another one. Use one of the ways below."
    )


def _facts(record: Record, recipe: Mapping[str, Any], data: str | Sequence[str] | None) -> str:
    encoding, shape = record.encoding, record.shape
    source = encoding.paper
    if re.fullmatch(r"\d{4}\.\d{4,5}", source):
        source = f"[arXiv {source}](https://arxiv.org/abs/{source})"
    parameters = {key: value for key, value in encoding.to_dict().items() if key != "name"}
    training_data = data or recipe.get("data")
    rows = {
        "base model": _listed(record.base_model) if record.base_model else "not recorded",
        "method": f"`{encoding.name}`: {encoding.summary()}",
        "parameters of the method": f"`{json.dumps(parameters)}`" if parameters else "none",
        "source": source,
        "pretrained window": f"{shape.trained_length:,} tokens",
        "window": f"{record.target_length:,} tokens, {record.target_length / shape.trained_length:g}×",
        **(
            {"rotated": f"{shape.dim} channels per head, base {shape.theta:g}"}
            if isinstance(encoding, RopeEncoding)
            else {}
        ),
        "data": _listed(training_data) if training_data else "not recorded",
    }
    if recipe:
        rows["training"] = ", ".join(
            f"{recipe[key]} {words}"
            for key, words in (("steps", "steps"), ("batch_size", "blocks each"), ("lora_rank", "LoRA rank"))
            if recipe.get(key) is not None
        )
        if recipe.get("positions", "consecutive") != "consecutive":
            rows["positions"] = (
                f"sampled ({recipe['positions']}), in blocks of {recipe.get('block_length')} tokens: "
                "training used no text as long as the window"
            )
        if recipe.get("packing", "none") != "none":
            rows["packing"] = (
                "several short documents in a block, with no attention between them; positions "
                f"{recipe['packing']}"
            )
        if recipe.get("mixed_windows") and recipe.get("short_share"):
            rows["mixed windows"] = (
                f"{recipe['short_share']:.0%} of the blocks hold short documents, with the table of the "
                "trained window ([arXiv 2502.20082](https://arxiv.org/abs/2502.20082))"
            )
    rows["made with"] = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    table = "\n".join(f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in rows.items())
    return f"| | |\n|---|---|\n{table}"


def _listed(value: str | Sequence[str]) -> str:
    """Names of models or data for a cell of a table; of local paths only the last part."""
    names = [value] if isinstance(value, str) else list(value)
    shown = [
        f"`{_one_line(public_name(name))}`{' (a local path)' if is_private(name) else ''}"
        for name in names[:_MOST_NAMES]
    ]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _one_line(text: str) -> str:
    """Text of a file that somebody else may have written, so that it stays inside its cell and its quotes."""
    return " ".join(text.split()).replace("`", "'")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _is_sources(value: Any) -> bool:
    """Whether a value is text or a list of text. By aliases, lists of lists can be longer than their file."""
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


_SHOWN: Mapping[str, Callable[[Any], bool]] = {
    "data": _is_sources,
    "steps": _is_count,
    "batch_size": _is_count,
    "lora_rank": _is_count,
    "positions": _is_name,
    "block_length": _is_count,
    "packing": _is_name,
    "mixed_windows": _is_flag,
    "short_share": _is_share,
}
"""What the card shows of a recipe, and whether a value has the form that recipes have."""


def _recipe(directory: Path) -> dict[str, Any]:
    """What the card shows of a run's recipe; empty, with a warning, if a recipe cannot look like that."""
    path = directory / "recipe.yaml"
    if not path.exists():
        return {}
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        logger.warning("%s is not shown in the card: %s", path, error)
        return {}
    if not isinstance(data, dict):
        logger.warning("%s is not shown in the card: it has no fields", path)
        return {}
    found = {key: data[key] for key in _SHOWN if data.get(key) is not None}
    if wrong := [key for key, value in found.items() if not _SHOWN[key](value)]:
        logger.warning("%s is not shown in the card: no recipe has such a value of %s", path, wrong[0])
        return {}
    return found


def _measured(
    results: str | None,
    perplexity: Mapping[int, float] | None,
    before: Mapping[int, float] | None,
    trained_on: int,
    picture: bool,
) -> str:
    if results is not None:
        return f"{results.strip()}\n\n{_PICTURE}" if picture else results.strip()
    if perplexity:
        lengths = sorted(perplexity)
        curves = [("before training, extended", before), ("after training", perplexity)]
        table = markdown_table([
            ["", *map(format_length, lengths)],
            *([title, *(number(curve.get(n)) for n in lengths)] for title, curve in curves if curve),
        ])  # fmt: skip
        if trained_on:
            return (
                f"After training, by length in tokens. {trained_on} of the documents are also training data, "
                f"so the text is not held out:\n\n{table}"
            )
        return f"After training, on held-out text, by length in tokens:\n\n{table}"
    return (
        "Not measured yet. `rope-extend evaluate` measures it at every length. `rope-extend card --results` "
        "adds the table and the picture here."
    )


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _quoted(name: str) -> str:
    """A name as the source of a Python string."""
    return json.dumps(name, ensure_ascii=False)


def _shell(*lines: str) -> str:
    return "\n".join(["```bash", *lines, "```"])


def _checkpoint_lines(directory: Path, record: Record, name: str) -> Iterator[str]:
    tokenizer = (directory / "tokenizer_config.json").exists()
    guarded = read_json(directory / "config.json").get("model_type") == MODEL_TYPE
    config = pretrained(AutoConfig, str(directory))
    depends_on_length = record.encoding.depends_on_length
    stock = not guarded and has_stock_config(config, record.target_length)
    lines = [
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if tokenizer else ''}",
        "",
        f'model = AutoModelForCausalLM.from_pretrained({_quoted(name)}, dtype="auto")',
        *([f"tokenizer = AutoTokenizer.from_pretrained({_quoted(name)})"] if tokenizer else []),
    ]
    yield "### transformers"
    if guarded:
        yield (
            f"Stock transformers does not support `{record.encoding.name}`, and refuses this checkpoint "
            "instead of loading it wrongly. With rope_extend installed it loads, without `trust_remote_code`:"
        )
        yield _python("import rope_extend  # registers this checkpoint's model type", *lines)
    elif not stock or depends_on_length:
        yield (
            f"Stock transformers computes `{record.encoding.name}` from the longest row of a batch, and "
            "inexactly with a cache."
            if stock
            else f"Stock transformers loads `{record.encoding.name}` **with the original window**."
        ) + " rope_extend loads it correctly:"
        yield _python("import rope_extend as rx", "", f'model = rx.load({_quoted(name)}, dtype="auto")')
    else:
        yield "`config.json` contains the encoding; nothing else is needed:"
        yield _python(*lines)
    yield "### peft"
    yield (
        "To train an adapter on this checkpoint, load it as above. The adapter works with peft alone, "
        "because the encoding is in this checkpoint."
        if stock and not depends_on_length
        else "To train an adapter on this checkpoint, or to use one, load the checkpoint as above."
    )
    yield from _server_lines(record, name, guarded)


def _adapter_lines(record: Record, name: str) -> Iterator[str]:
    base = public_name(record.base_model or "BASE_MODEL")
    replaced = record.base_model is not None and is_private(record.base_model)
    note = "  # a local path: replace it by your own, or by a hub id" if replaced else ""
    file, of_base = None, ""
    if _is_gguf(record.base_model):
        file, base, of_base = base, _CONVERTED, f" --base-model {_CONVERTED}"
    yield "### rope_extend"
    yield "This applies the encoding, then the weights, and checks that the base model is the right one:"
    yield _python("import rope_extend as rx", "", f"model = rx.load({_quoted(name)})")
    if file is not None:
        yield (
            f"The base model is a GGUF file. All that follows needs it as a checkpoint, here called `{base}`:"
        )
        yield _shell(f"{CONVERT} {quote(file)} --dtype bfloat16 --output {base}{note}")
        note = ""
    yield "### transformers and peft"
    stock = _stock_settings(record)
    if stock is None:
        yield (
            f"Stock transformers does not support `{record.encoding.name}` exactly. With rope_extend, on a "
            "model that is already loaded:"
        )
        yield _python(
            "from transformers import AutoModelForCausalLM",
            "import rope_extend as rx",
            "",
            f"base = AutoModelForCausalLM.from_pretrained({_quoted(base)}){note}",
            f"model = rx.load_adapter(base, {_quoted(name)})",
        )
    else:
        yield "Without rope_extend, set the encoding in the base model's config:"
        yield _python(
            "from peft import PeftModel",
            "from transformers import AutoConfig, AutoModelForCausalLM",
            "",
            f"config = AutoConfig.from_pretrained({_quoted(base)}){note}",
            *(f"config.{key} = {value!r}" for key, value in stock.items()),
            f"base = AutoModelForCausalLM.from_pretrained({_quoted(base)}, config=config){note}",
            f"model = PeftModel.from_pretrained(base, {_quoted(name)})",
        )
    yield "### vLLM and llama.cpp"
    yield (
        "Serving an adapter on its base model (`--enable-lora`, `--lora`) uses the original window. Merge it "
        "first. The merged checkpoint's card has the commands for both servers:"
    )
    yield _shell(
        f"rope-extend merge {quote(name)}{of_base} --output {quote(name + '-merged')}",
        f"rope-extend verify {quote(name + '-merged')}",
    )


def _stock_settings(record: Record) -> dict[str, Any] | None:
    """The settings of a stock config that give the recorded encoding.

    None if stock transformers does not support it exactly, or the base model is not available.
    """
    encoding = record.encoding
    if not isinstance(encoding, RopeEncoding) or encoding.depends_on_length or not record.base_model:
        return None
    try:
        model: Any = empty_model(record.base_model)
    except RopeExtendError:
        return None
    old = model.config.to_dict()
    with patch_model(
        model, encoding, trained_length=record.shape.trained_length, target_length=record.target_length
    ):
        config = model.config
        if rotary_part(config)[0] is not config or not has_stock_config(config, record.target_length):
            return None
        names = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
        values = {name: getattr(config, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None and value != old.get(name)}


def _server_lines(record: Record, name: str, guarded: bool) -> Iterator[str]:
    window = record.target_length
    targets = {
        target: support(record.encoding, record.shape, target, record.model_type, target_length=window)
        for target in ("vllm", "llama.cpp")
    }
    yield "### vLLM"
    if targets["vllm"].possible:
        yield (
            f"vLLM computes this encoding exactly, {targets['vllm'].reason}. It reads some types by other "
            "rules than transformers. The export writes the form that vLLM reads, and `--max-model-len` "
            "sets the window:"
        )
        yield _shell(
            f"rope-extend export {quote(name)} --to vllm --output {quote(name + '-vllm')}",
            f"vllm serve {quote(name + '-vllm')} --max-model-len {window}",
        )
    else:
        yield f"vLLM does not support this encoding: {targets['vllm'].reason}."
    yield "### llama.cpp"
    plain, file = f"{name}-plain" if guarded else name, f"{name}.gguf"
    refused = (
        f"Its converter refuses this directory; `{plain}` is the same checkpoint, merged with `--no-guard`. "
        if guarded
        else ""
    )
    if not targets["llama.cpp"].possible:
        yield f"llama.cpp does not support this encoding: {targets['llama.cpp'].reason}."
    else:
        yield (
            f"llama.cpp computes this encoding exactly, {targets['llama.cpp'].reason}. {refused}A converted "
            "file may silently lack part of the schedule; the export adds it:"
        )
        yield _shell(
            f"python convert_hf_to_gguf.py {quote(plain)} --outfile {quote(file)}",
            f"rope-extend export {quote(name)} --to llama.cpp --gguf {quote(file)} "
            f"--output {quote(name + '-gguf')}",
            f"llama-cli -m {quote(f'{name}-gguf/{Path(file).name}')} -c {window}",
        )


def _limits(directory: Path, record: Record, measured: bool) -> Iterator[str]:
    encoding, shape = record.encoding, record.shape
    yield f"It is not known how the model behaves beyond {record.target_length:,} tokens."
    if isinstance(encoding, RopeEncoding):
        if encoding.depends_on_length:
            yield "The rotary table depends on the length of the text, so no single table represents it."
        elif not encoding.inv_freq(shape).equal(shape.inv_freq()):
            yield (
                "Short texts use the same table. Within the pretrained window of "
                f"{shape.trained_length:,} tokens, the model may be slightly worse than the base model."
            )
    if measured:
        yield "Perplexity shows how well the model predicts long texts, not how well it finds facts in them."
    else:
        yield "Its quality has not been measured."
    if (directory / "verification.json").exists():
        data = read_json(directory / "verification.json")
        # A verification of an earlier checkpoint in this directory says nothing about this one.
        if data.get("record") == sha256(directory / RECORD_NAME):
            yield f"Verified in a separate process: {data.get('verdict')} ({data.get('reason')})."
