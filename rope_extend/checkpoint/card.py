"""The model card: what a checkpoint is, how it was made and measured, and the lines that load it rightly.

A loader that is given the wrong line does not fail: it reads on the old window. So every line here is one
that works for this encoding in this form, and where none does the card says why.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from transformers import AutoConfig

from rope_extend.checkpoint.manifest import RECORD_NAME, read_json
from rope_extend.checkpoint.record import Record, read_record
from rope_extend.checkpoint.registry import MODEL_TYPE, has_stock_form
from rope_extend.data import format_length
from rope_extend.encodings import RopeEncoding
from rope_extend.errors import RopeExtendError
from rope_extend.files import write_whole
from rope_extend.inspection import rotary_part
from rope_extend.patching import patch_model
from rope_extend.pretrained import empty_model, pretrained

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
PICTURE_NAME = "perplexity.png"
_MARK = re.compile(r"\n<!-- written by rope_extend, ([0-9a-f]{64}) -->\n\Z")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(
    directory: str | PathLike[str],
    *,
    results: str | PathLike[str] | None = None,
    data: str | Sequence[str] | None = None,
    perplexity: Mapping[int, float] | None = None,
    before: Mapping[int, float] | None = None,
    trained_in: str | PathLike[str] | None = None,
    name: str | None = None,
) -> str:
    """The text of a checkpoint's card, Markdown with the hub's front matter.

    The license is left to whoever publishes the model.

    Args:
        directory: an adapter or a full checkpoint, with its record.
        results: `results.jsonl` of an evaluation, or its directory: the table, and the picture beside the
            card.
        data: what it was trained on; by default what the run's recipe says.
        perplexity: by length in tokens, where there are no `results`.
        before: the same before training.
        trained_in: directory of the run, with `recipe.yaml`; by default `directory`.
        name: what the lines call the checkpoint; by default its directory's name, so that they work from
            the directory above it.

    Raises:
        RopeExtendError: no or a damaged record, or results that cannot be read.
    """
    directory = Path(directory)
    record = read_record(directory)
    adapter = (directory / "adapter_config.json").exists()
    name = name or directory.resolve().name
    title = " ".join(name.split())
    window = format_length(record.target_length)
    parts = [
        _front_matter(record, adapter),
        f"# {title}",
        _warning(record) if adapter else "",
        f"{'A LoRA adapter' if adapter else 'A checkpoint'} that reads {window} tokens, of a "
        f"{record.model_type} model pretrained on {format_length(record.shape.trained_length)}.",
        _facts(record, _recipe(Path(trained_in or directory)), data),
        "## Perplexity",
        _measured(results, perplexity, before),
        "## Loading",
        f"`{title}` is this directory, seen from the one above it; put the hub id or path in its place.",
        *(_adapter_lines(record, name) if adapter else _checkpoint_lines(directory, record, name)),
        "## Limits",
        "\n".join(f"- {limit}" for limit in _limits(directory, record, results, perplexity)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_card(
    directory: str | PathLike[str], *, results: str | PathLike[str] | None = None, **options: Any
) -> Path | None:
    """Write `README.md`, and the picture if there are results; returns its path.

    A `README.md` that somebody wrote or edited stays: the return value is then None.

    Args:
        directory: an adapter or a full checkpoint, with its record.
        results: as in `model_card`.
        options: the others of `model_card`.

    Raises:
        RopeExtendError: as `model_card`, or the file cannot be written.
    """
    path = Path(directory) / CARD_NAME
    text = model_card(directory, results=results, **options)
    try:
        if path.exists() and not _ours(path.read_text(encoding="utf-8")):
            logger.info("%s is not one that rope_extend wrote, or was edited; it stays as it is", path)
            return None
        if results is not None:
            _draw(results, path.with_name(PICTURE_NAME))
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_whole(path, f"{text}\n<!-- written by rope_extend, {digest} -->\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RopeExtendError(f"cannot write {path}: {error}") from error
    return path


def add_card(directory: str | PathLike[str], **options: Any) -> None:
    """`write_card` at the end of work that is done: what goes wrong with the card is logged, not raised."""
    try:
        write_card(directory, **options)
    except RopeExtendError as error:
        logger.warning("no model card: %s", error)


def _ours(text: str) -> bool:
    """Whether a card is as it was written."""
    mark = _MARK.search(text)
    return mark is not None and hashlib.sha256(text[: mark.start()].encode()).hexdigest() == mark[1]


# ---------------------------------------------------------------------------------------------------------
# What it is


def _front_matter(record: Record, adapter: bool) -> str:
    data: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rope_extend", "long-context", record.encoding.name, *(["lora"] if adapter else [])],
    }
    if _is_hub_id(record.base_model):
        data = {"base_model": record.base_model, **data}
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return f"---\n{text}# license: yours to state; the base model's terms may bind you\n---"


def _is_hub_id(name: str | None) -> bool:
    return name is not None and _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _warning(record: Record) -> str:
    return (
        "> **Warning.** Stock `PeftModel.from_pretrained` loads this adapter and **forgets its position "
        f"encoding** without a word: the model then reads on its old window of {record.shape.trained_length} "
        "tokens, with weights that were trained for another. Use one of the ways below."
    )


def _facts(record: Record, recipe: Mapping[str, Any], data: str | Sequence[str] | None) -> str:
    encoding, shape = record.encoding, record.shape
    source = encoding.paper
    if re.fullmatch(r"\d{4}\.\d{4,5}", source):
        source = f"[arXiv {source}](https://arxiv.org/abs/{source})"
    shown = {key: value for key, value in encoding.to_dict().items() if key != "name"}
    trained = data or recipe.get("data")
    rows = {
        "base model": f"`{record.base_model}`" if record.base_model else "not on record",
        "method": f"`{encoding.name}`: {encoding.summary()}",
        "its parameters": f"`{json.dumps(shown)}`" if shown else "none",
        "source": source,
        "pretrained window": f"{shape.trained_length:,} tokens",
        "window": f"{record.target_length:,} tokens, {record.target_length / shape.trained_length:g}×",
        **(
            {"rotated": f"{shape.dim} channels per head, base {shape.theta:g}"}
            if isinstance(encoding, RopeEncoding)
            else {}
        ),
        "data": _listed(trained) if trained else "not on record",
    }
    if recipe:
        rows["training"] = ", ".join(
            f"{recipe[key]} {words}"
            for key, words in (("steps", "steps"), ("batch_size", "blocks each"), ("lora_rank", "LoRA rank"))
            if recipe.get(key) is not None
        )
        if recipe.get("positions", "consecutive") != "consecutive":
            rows["positions"] = (
                f"sampled ({recipe['positions']}), in blocks of {recipe.get('block_length')} tokens: no text "
                "of the whole window was read in training"
            )
        if recipe.get("packing", "none") != "none":
            rows["packing"] = (
                "short documents side by side in a block, none of which saw another; positions "
                f"{recipe['packing']}"
            )
        if recipe.get("shifted_sparse"):
            rows["attention in training"] = (
                f"shifted and sparse ([arXiv 2309.12307](https://arxiv.org/abs/2309.12307)), in groups of "
                f"{recipe['shifted_sparse']} tokens: an approximation of the attention that it reads with"
            )
    rows["made with"] = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    table = "\n".join(f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in rows.items())
    return f"| | |\n|---|---|\n{table}"


def _listed(value: str | Sequence[str]) -> str:
    return ", ".join(f"`{each}`" for each in ([value] if isinstance(value, str) else value))


def _recipe(directory: Path) -> dict[str, Any]:
    """What a run's recipe says; nothing if there is none that can be read."""
    try:
        data = yaml.safe_load((directory / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


# ---------------------------------------------------------------------------------------------------------
# How it was measured


def _measured(
    results: str | PathLike[str] | None,
    perplexity: Mapping[int, float] | None,
    before: Mapping[int, float] | None,
) -> str:
    if results is not None:
        from rope_extend.evaluation.report import markdown_table, read_results

        table = markdown_table(read_results(Path(results))).strip()
        return f"{table}\n\n![Perplexity against length]({PICTURE_NAME})"
    if perplexity:
        from rope_extend.evaluation.tables import markdown_table as aligned
        from rope_extend.evaluation.tables import number

        lengths = sorted(perplexity)
        rows = [("before training, extended", before), ("at its end", perplexity)]
        table = aligned([
            ["", *map(format_length, lengths)],
            *([name, *(number(row.get(one)) for one in lengths)] for name, row in rows if row),
        ])  # fmt: skip
        return f"At the end of training, on held-out text, by length in tokens:\n\n{table}"
    return (
        "Not measured yet. `rope-extend evaluate` measures it at every length, and `rope-extend card "
        "--results` puts the table and the picture here."
    )


def _draw(results: str | PathLike[str], path: Path) -> None:
    from rope_extend import plots
    from rope_extend.evaluation.report import read_results

    rows = read_results(Path(results))
    trained = next((row.trained_length for row in rows if row.trained_length), None)
    if trained is None:
        raise RopeExtendError("these results do not say the trained window; evaluate again")
    plots.plot_perplexity(rows, trained, path)


# ---------------------------------------------------------------------------------------------------------
# How it is loaded


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _quoted(name: str) -> str:
    """A name as a Python string."""
    return json.dumps(name, ensure_ascii=False)


def _shell(*lines: str) -> str:
    return "\n".join(["```bash", *lines, "```"])


def _checkpoint_lines(directory: Path, record: Record, name: str) -> Iterator[str]:
    tokenizer = (directory / "tokenizer_config.json").exists()
    guarded = read_json(directory / "config.json").get("model_type") == MODEL_TYPE
    config = pretrained(AutoConfig, str(directory))
    follows = isinstance(record.encoding, RopeEncoding) and record.encoding.depends_on_length
    stock = not guarded and has_stock_form(config, record.target_length)
    lines = [
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if tokenizer else ''}",
        "",
        f'model = AutoModelForCausalLM.from_pretrained({_quoted(name)}, dtype="auto")',
        *([f"tokenizer = AutoTokenizer.from_pretrained({_quoted(name)})"] if tokenizer else []),
    ]
    yield "### transformers"
    if guarded:
        yield (
            f"Stock transformers has no form for `{record.encoding.name}`, and refuses this checkpoint "
            "rather than read it wrongly. With rope_extend installed it loads, without `trust_remote_code`:"
        )
        yield _python("import rope_extend  # registers how this checkpoint reads positions", *lines)
    elif not stock or follows:
        yield (
            f"Stock transformers reads `{record.encoding.name}` "
            + (
                "by the longest row of a batch, and inexactly with a cache"
                if stock
                else "**on the old window**"
            )
            + ". With rope_extend it reads as it should:"
        )
        yield _python("import rope_extend as rx", "", f'model = rx.load({_quoted(name)}, dtype="auto")')
    else:
        yield "`config.json` carries the encoding; nothing else is needed:"
        yield _python(*lines)
    yield "### peft"
    yield (
        "As the base of an adapter, load it as above. An adapter that is trained on it and saved by peft "
        "alone keeps working, because the encoding is in this checkpoint."
        if stock and not follows
        else "As the base of an adapter, load it as above, in training and afterwards."
    )
    yield from _server_lines(record, name, guarded)


def _adapter_lines(record: Record, name: str) -> Iterator[str]:
    base = record.base_model or "BASE_MODEL"
    yield "### rope_extend"
    yield "The encoding is applied before the weights, and the base model is checked:"
    yield _python("import rope_extend as rx", "", f"model = rx.load({_quoted(name)})")
    yield "### transformers and peft"
    stock = _stock_settings(record)
    if stock is None:
        yield (
            f"Stock transformers has no exact form for `{record.encoding.name}`; on a model that is already "
            "loaded:"
        )
        yield _python(
            "from transformers import AutoModelForCausalLM",
            "import rope_extend as rx",
            "",
            f"base = AutoModelForCausalLM.from_pretrained({_quoted(base)})",
            f"model = rx.load_adapter(base, {_quoted(name)})",
        )
    else:
        yield "Without rope_extend, the encoding has to be given to the base model:"
        yield _python(
            "from peft import PeftModel",
            "from transformers import AutoConfig, AutoModelForCausalLM",
            "",
            f"config = AutoConfig.from_pretrained({_quoted(base)})",
            *(f"config.{key} = {value!r}" for key, value in stock.items()),
            f"base = AutoModelForCausalLM.from_pretrained({_quoted(base)}, config=config)",
            f"model = PeftModel.from_pretrained(base, {_quoted(name)})",
        )
    yield "### vLLM and llama.cpp"
    yield (
        "Serving an adapter on its base model (`--enable-lora`, `--lora`) reads on the old window. Merge it "
        "first; the merged checkpoint's card has the lines for both:"
    )
    yield _shell(
        f"rope-extend merge {quote(name)} --output {quote(name + '-merged')}",
        f"rope-extend verify {quote(name + '-merged')}",
    )


def _stock_settings(record: Record) -> dict[str, Any] | None:
    """What a stock config needs to read as recorded; None without an exact form, or without the base."""
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
        if rotary_part(config)[0] is not config or not has_stock_form(config, record.target_length):
            return None
        names = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
        values = {name: getattr(config, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None and value != old.get(name)}


def _server_lines(record: Record, name: str, guarded: bool) -> Iterator[str]:
    from rope_extend.checkpoint.exporting import support

    window = record.target_length
    found = {
        target: support(record.encoding, record.shape, target, record.model_type, target_length=window)
        for target in ("vllm", "llama.cpp")
    }
    yield "### vLLM"
    if found["vllm"].possible:
        yield (
            f"Exactly, {found['vllm'].reason}. vLLM reads some types by other rules than transformers; the "
            "export writes the form that it reads, and `--max-model-len` states the window:"
        )
        yield _shell(
            f"rope-extend export {quote(name)} --to vllm --output {quote(name + '-vllm')}",
            f"vllm serve {quote(name + '-vllm')} --max-model-len {window}",
        )
    else:
        yield f"vLLM cannot read this encoding: {found['vllm'].reason}."
    yield "### llama.cpp"
    plain, file = f"{name}-plain" if guarded else name, f"{name}.gguf"
    refused = (
        f"Its converter refuses this directory; `{plain}` is the same, merged with `--no-guard`. "
        if guarded
        else ""
    )
    if not found["llama.cpp"].possible:
        yield f"llama.cpp cannot read this encoding: {found['llama.cpp'].reason}."
    else:
        yield (
            f"Exactly, {found['llama.cpp'].reason}. {refused}A converted file alone may lack part of the "
            "schedule without a word; the export writes it in:"
        )
        yield _shell(
            f"python convert_hf_to_gguf.py {quote(plain)} --outfile {quote(file)}",
            f"rope-extend export {quote(name)} --to llama.cpp --gguf {quote(file)} "
            f"--output {quote(name + '-gguf')}",
            f"llama-cli -m {quote(f'{name}-gguf/{Path(file).name}')} -c {window}",
        )


def _limits(
    directory: Path,
    record: Record,
    results: str | PathLike[str] | None,
    perplexity: Mapping[int, float] | None,
) -> Iterator[str]:
    encoding, shape = record.encoding, record.shape
    yield f"Nothing is known of it beyond {record.target_length:,} tokens."
    if isinstance(encoding, RopeEncoding):
        if encoding.depends_on_length:
            yield "The rotary table follows the length of the text; no one table stands for it."
        elif not encoding.inv_freq(shape).equal(shape.inv_freq()):
            yield (
                f"The same table serves short texts: within the pretrained window of "
                f"{shape.trained_length:,} tokens it may read a little worse than the base model."
            )
    if results is None and not perplexity:
        yield "How well it reads has not been measured."
    else:
        yield "Perplexity says how well it predicts long texts, not how well it finds things in them."
    if (directory / "verification.json").exists():
        data = read_json(directory / "verification.json")
        # One of a checkpoint that was here before says nothing of this one.
        if data.get("record") == hashlib.sha256((directory / RECORD_NAME).read_bytes()).hexdigest():
            yield f"Verified in a separate process: {data.get('verdict')} ({data.get('reason')})."
