"""Export: a checkpoint in the form that stock transformers, vLLM, SGLang or llama.cpp reads, or why not.

Verdicts follow from what an encoding does, not from its name. What is said of a target was read in its
source:

- transformers, `modeling_rope_utils.py`: `longrope` takes any list of divisors and an `attention_factor`, and
  picks the list by the longest row of a batch; so does `dynamic` with its base.
- vLLM, `vllm/model_executor/layers/rotary_embedding/__init__.py` and its neighbours: `get_rope` knows
  `default`, `linear`, `llama3`, `yarn` and `longrope`, and raises on unknown types. Its `longrope` has no
  `attention_factor` but `short_mscale` and `long_mscale`, reads all texts by the long list where
  `--max-model-len` exceeds the trained window, and raises where pairs are neighbours. Which of YaRN's keys
  for attention it reads has changed over its versions. `_get_and_verify_max_len`: the window is
  `max_position_embeddings` times `factor`, for `yarn` the original one times `factor`, and for `longrope`
  and `llama3` `max_position_embeddings`.
- SGLang, `python/sglang/srt/layers/rotary_embedding/factory.py`, `yarn.py` and `rope_variant.py`: the same
  types and the same keys in `longrope`; `yarn` has no `attention_factor`. Its `longrope` looks position L up
  as position 0 if none beyond it is in the batch, L being the `original_max_position_embeddings`.
  `get_context_length`: `max_position_embeddings` times `factor`, unless there is an original one.
- llama.cpp: see `rope_extend.checkpoint.gguf`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from rope_extend.checkpoint.gguf import (
    annotate,
    architecture_of,
    can_verify,
    is_float32,
    schedule,
    verify_gguf,
)
from rope_extend.checkpoint.manifest import RECORD_NAME, locate, read_json
from rope_extend.checkpoint.record import Record, seal, write_record
from rope_extend.checkpoint.registry import plain_config
from rope_extend.checkpoint.saving import checked_record, load, local_directory
from rope_extend.checkpoint.staging import staged
from rope_extend.checkpoint.tables import beyond_a_table, has_tables_of, rotary_tables
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, encodings, method_named
from rope_extend.encodings.base import STILL
from rope_extend.errors import RopeExtendError
from rope_extend.families import FamilyAdapter, adapter_for, find_adapter
from rope_extend.inspection import CONFIG_RECORD
from rope_extend.pretrained import empty_model, one_error, pretrained
from rope_extend.stock_forms import CARRIED, softmax_scale_of

logger = logging.getLogger(__name__)

TARGETS = ("transformers", "vllm", "sglang", "llama.cpp")
NATIVE = "native"
FACTORS = "exact by factors"
PLUGIN = "needs rope_extend"
IMPOSSIBLE = "impossible"

_LEFT_BEHIND = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
"""Files that are not exported: the state of a training run, and models of another format."""


_UNKNOWN = "how it reads this family's rotary parameters was not established"
_WRITTEN_ANEW = ("config.json", RECORD_NAME, "verification.json")


@dataclass(frozen=True)
class Support:
    """Whether a target computes an encoding, and in which form.

    Attributes:
        target: one of `TARGETS`.
        verdict: `native`, the target has the method or a simpler one with the same table; `exact by
            factors`, it reads the table itself; `needs rope_extend`, it does with `rope_extend.load`; or
            `impossible`.
        reason: why, in a phrase.
        form: what is written: for llama.cpp metadata and tensors, else keys of `config.json`; None where
            nothing can be.
    """

    target: str
    verdict: str
    reason: str
    form: Mapping[str, Any] | None = None

    @property
    def possible(self) -> bool:
        """Whether the target reads it without this library."""
        return self.form is not None


# ---------------------------------------------------------------------------------------------------------
# Verdicts


def support(
    encoding: Encoding,
    shape: RopeShape,
    target: str,
    model_type: str | None = None,
    *,
    target_length: int | None = None,
) -> Support:
    """Whether, and how, a target computes an encoding without this library.

    Args:
        encoding: the position encoding.
        shape: the rotary shape of the pretrained model.
        target: one of `TARGETS`.
        model_type: the family; without it, one of Llama's shape.
        target_length: the window, in tokens; by default the encoding's own.

    Raises:
        RopeExtendError: an unknown target, or an encoding that does not fit the shape.
    """
    if target not in TARGETS:
        raise RopeExtendError(f"export goes to {', '.join(TARGETS)}, got {target!r}")
    obstacle = beyond_a_table(encoding, shape)
    if obstacle and not (target == "transformers" and getattr(encoding, "per_row", False)):
        return _refused(target, obstacle)
    assert isinstance(encoding, RopeEncoding)
    length = target_length or encoding.target_length(shape) or shape.trained_length
    adapter = find_adapter(model_type) if model_type else None
    if target == "transformers":
        return _for_transformers(encoding, shape, length, adapter, obstacle)
    if target == "llama.cpp":
        return _for_llama_cpp(encoding, shape, length, model_type)
    return _for_server(encoding, shape, length, adapter, target)


def _is_unknown(adapter: FamilyAdapter | None) -> bool:
    """Whether a family has rotary parameters of several kinds, or below the top of its config: only
    transformers was seen to read those.
    """
    return adapter is not None and bool(adapter.layer_types or adapter.config_path)


def _refused(target: str, reason: str) -> Support:
    return Support(target, PLUGIN if target == "transformers" else IMPOSSIBLE, reason)


def _container(encoding: RopeEncoding, shape: RopeShape) -> dict[str, Any]:
    """A static table as `longrope` with two equal lists; a pair that does not turn is slowed to a halt."""
    table = encoding.inv_freq(shape)
    factors = torch.where(table > 0, shape.inv_freq() / table, STILL).tolist()
    return {
        "rope_type": "longrope", "rope_theta": shape.theta, "short_factor": factors, "long_factor": factors,
        "attention_factor": encoding.attention_factor(shape),
        "original_max_position_embeddings": shape.trained_length, "factor": 1.0,
    }  # fmt: skip


def _simple_form(encoding: RopeEncoding, shape: RopeShape) -> dict[str, Any] | None:
    """The form that says more than a table does, if there is one."""
    with suppress(RopeExtendError):
        form = encoding.rope_parameters(shape)
        if form["rope_type"] in ("default", encoding.rope_type):
            return form
    return None


def _native(target: str, form: Mapping[str, Any], window: int) -> Support:
    kind = form["rope_type"]
    reason = f"as base {form['rope_theta']:.6g}" if kind == "default" else f"type {kind}"
    return Support(target, NATIVE, reason, {"rope_parameters": form, "max_position_embeddings": window})


def _for_transformers(
    encoding: RopeEncoding, shape: RopeShape, length: int, adapter: FamilyAdapter | None, obstacle: str
) -> Support:
    form, window = _simple_form(encoding, shape), encoding.max_position_embeddings(shape, length)

    def accepts(kind: str) -> bool:
        return adapter is None or adapter.accepts(kind)

    if form and accepts(form["rope_type"]):
        found = _native("transformers", form, window)
        if not obstacle:
            return found
        told = (
            f"{found.reason}, by the longest row of a batch; beyond the trained window with use_cache=False"
        )
        return Support("transformers", NATIVE, told, found.form)
    if obstacle:
        return _refused("transformers", obstacle)
    if not accepts("longrope"):
        return _refused("transformers", "the family's config takes no longrope, which would carry its table")
    form = {"rope_parameters": _container(encoding, shape), "max_position_embeddings": window}
    return Support("transformers", FACTORS, "as longrope with equal lists", form)


def _for_server(
    encoding: RopeEncoding, shape: RopeShape, length: int, adapter: FamilyAdapter | None, target: str
) -> Support:
    form = _simple_form(encoding, shape)
    kind = form["rope_type"] if form else ""
    # DeepSeek's classes rename other types before get_rope sees them; sections go with `default` and `yarn`.
    if _is_unknown(adapter) or (
        adapter and kind != "default" and (adapter.sections or adapter.rotated != "first")
    ):
        return _refused(target, _UNKNOWN)
    if form and kind == "default":
        return _native(target, form, length)
    if form and (adapter is None or adapter.accepts(kind)):
        if kind == "linear":  # both multiply the window that the config states by the factor
            return _native(target, form, shape.trained_length)
        if kind == "llama3":
            return _native(target, form, length)
        own = 0.1 * math.log(form.get("factor", 1.0)) + 1
        if kind == "yarn" and math.isclose(encoding.attention_factor(shape), own, rel_tol=1e-9):
            form = {
                key: form[key] for key in form if key not in ("attention_factor", "mscale", "mscale_all_dim")
            }
            return _native(target, form, length)
    if adapter and not adapter.accepts("longrope"):
        return _refused(target, "the family's config takes no longrope, which would carry its table")
    if adapter and adapter.pairs == "neighbours":
        return _refused(
            target, "its longrope, which would carry the table, does not turn neighbouring channels"
        )
    form = _container(encoding, shape)
    form |= {"short_mscale": form["attention_factor"], "long_mscale": form["attention_factor"]}
    if target == "sglang":  # so that no position is looked up in the wrong one of its two tables
        form["original_max_position_embeddings"] = length
    reason = "as longrope with equal lists, and the attention factor as short_mscale and long_mscale"
    return Support(target, FACTORS, reason, {"rope_parameters": form, "max_position_embeddings": length})


def _for_llama_cpp(encoding: RopeEncoding, shape: RopeShape, length: int, model_type: str | None) -> Support:
    if model_type and _is_unknown(find_adapter(model_type)):
        return _refused("llama.cpp", _UNKNOWN)
    architecture = None if model_type is None else architecture_of(model_type) or model_type
    try:
        made = schedule(encoding, shape, length, architecture)
    except RopeExtendError as error:
        return _refused("llama.cpp", str(error))
    form = {"keys": made.keys, "tensors": made.tensors}
    if made.tensors:
        reason = f"as {', '.join(made.tensors)} and rope.scaling.attn_factor"
        return Support("llama.cpp", FACTORS, reason, form)
    kind = made.keys["rope.scaling.type"]
    reason = f"as rope.freq_base {made.keys['rope.freq_base']:.6g}" if kind == "none" else f"type {kind}"
    return Support("llama.cpp", NATIVE, reason, form)


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
"""Methods whose parameters, or the method inside them, decide the verdict; shown beside all defaults."""


def examples(shape: RopeShape, target_length: int) -> Iterator[Encoding]:
    """Every method for a target length, rotary ones first, and the variants whose verdicts differ."""
    rotary = encodings(RopeEncoding)
    for name, parameters in sorted([*((name, {}) for name in rotary), *_VARIANTS], key=lambda row: row[0]):
        given = dict(parameters)
        if name == "longrope":
            given["long_factor"] = [1.0 + i for i in range(shape.dim // 2)]
            if given.pop("short", False):
                given["short_factor"] = given["long_factor"]
        yield method_named(name).for_target(shape, target_length, **given)
    for name in encodings():
        if name not in rotary:
            yield method_named(name).for_target(shape, target_length)


def support_table(
    rows: Sequence[Encoding],
    shape: RopeShape,
    *,
    model_type: str | None = None,
    target_length: int | None = None,
    targets: Sequence[str] = TARGETS,
) -> str:
    """Encodings against targets, in Markdown, with the reasons numbered below the table.

    Args:
        rows: encodings, one row each.
        shape: the rotary shape of the pretrained model.
        model_type: the family; without it, one of Llama's shape.
        target_length: the window, in tokens; by default each encoding's own.
        targets: the columns.
    """
    reasons: dict[str, int] = {}
    lines = [f"| encoding | {' | '.join(targets)} |", "|---" * (len(targets) + 1) + "|"]
    for encoding in rows:
        cells = []
        for target in targets:
            found = support(encoding, shape, target, model_type, target_length=target_length)
            cells.append(f"{found.verdict} ({reasons.setdefault(found.reason, len(reasons) + 1)})")
        lines.append(f"| `{encoding}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())])


# ---------------------------------------------------------------------------------------------------------
# Writing


def export(
    directory: str | PathLike[str],
    output: str | PathLike[str],
    to: str = "transformers",
    *,
    overwrite: bool = False,
    verify: bool = True,
    base_model: str | None = None,
    gguf: str | PathLike[str] | None = None,
) -> Path:
    """Write a checkpoint that a target reads without this library; returns its directory.

    Weights are linked, or copied where the disk is another, byte for byte; nothing is serialised again. The
    directory appears when it is complete, and verified if that was asked for.

    Args:
        directory: what `rope_extend.save` or `merge` wrote; an adapter is merged first.
        output: where to.
        to: `transformers`, `vllm`, `sglang` or `llama.cpp`.
        overwrite: replace a checkpoint that is already there; other files stay.
        verify: compare the logits with those of the patched model: in stock transformers, in a process of its
            own; for llama.cpp in llama.cpp, if llama-cpp-python is installed.
        base_model: name or path of an adapter's base model, where it is not where the record says.
        gguf: for llama.cpp, the file that its `convert_hf_to_gguf.py` made of these weights.

    Raises:
        RopeExtendError: the target cannot compute the encoding, with the reason; the directory is no
            checkpoint or not sound; the output is in use; or the export does not read as the original.
    """
    source, target = local_directory(directory), Path(output)
    record = checked_record(source, True)
    found = support(record.encoding, record.shape, to, record.model_type, target_length=record.target_length)
    if target.exists() and source.resolve() == target.resolve():
        raise RopeExtendError(f"{target} is the checkpoint itself; choose another output")
    if gguf is not None and (file := target / Path(gguf).name).exists():
        if os.path.samefile(file, gguf):
            raise RopeExtendError(f"{file} is the source itself; choose another output")
        if not overwrite:
            raise RopeExtendError(f"{target} already holds {file.name}; choose another, or overwrite=True")
    if not found.possible and to != "llama.cpp":
        raise _refusal(record, found)
    if to == "llama.cpp":
        if gguf is None:
            raise RopeExtendError(
                "llama.cpp reads GGUF: convert the weights with its convert_hf_to_gguf.py, and give the file "
                "as gguf= (--gguf)"
            )
        # Whether a table can be carried follows from the file's architecture, of which the family is a guess.
        unknown = _UNKNOWN if _is_unknown(adapter_for(record.model_type)) else ""
        if obstacle := beyond_a_table(record.encoding, record.shape) or unknown:
            raise _refusal(record, _refused(to, obstacle))
    elif gguf is not None:
        raise RopeExtendError(f"gguf= is for llama.cpp; {to} reads safetensors")
    with staged(target, overwrite=overwrite) as directory:
        if gguf is not None:
            _export_gguf(source, directory, record, Path(gguf), base_model, verify)
        else:
            # Beside the export, so that its weights can be linked; gone before the export appears.
            with TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as merged:
                if (source / "adapter_config.json").exists():
                    from rope_extend.checkpoint.merging import merge

                    source = merge(source, merged, base_model=base_model)
                _export_config(source, directory, record, found)
                if verify:
                    _verify(directory, source)
    return target


def _refusal(record: Record, found: Support) -> RopeExtendError:
    targets = [
        target
        for target in TARGETS
        if support(record.encoding, record.shape, target, record.model_type).possible
    ]
    instead = f"it can be exported to {', '.join(targets)}" if targets else "rope_extend.load reads it"
    return RopeExtendError(
        f"{record.encoding} of a {record.model_type} model cannot be exported to {found.target}: "
        f"{found.reason}; {instead}"
    )


def _export_gguf(
    source: Path, staging: Path, record: Record, gguf: Path, base_model: str | None, verify: bool
) -> None:
    """Fill a directory with the annotated file, and with a record that speaks of no other files."""
    path = annotate(gguf, staging / gguf.name, record)
    write_record(staging, replace(record, weights={}, configs={}))
    if not verify:
        return
    missing = "" if can_verify() else "llama-cpp-python is not installed"
    if missing or not is_float32(path):
        why = missing or "its weights are rounded; convert them with --outtype f32 to compare"
        logger.warning("%s was not compared with the original: %s", gguf.name, why)
        return
    gap = verify_gguf(path, load(source, base_model=base_model, dtype=torch.float32), record)
    logger.info("llama.cpp reads %s as the original: logits differ by at most %.1g", gguf.name, gap)


def _export_config(source: Path, staging: Path, record: Record, found: Support) -> None:
    """Fill a directory with the checkpoint's files and a config of the target's form."""
    assert found.form is not None
    data = plain_config(read_json(source / "config.json"))
    pairs = _stock_pairs(source)
    with one_error(f"{source / 'config.json'} is damaged"):
        forms = [_with_form(data, pretrained(AutoConfig, str(source)), found.form)]
    if found.target == "transformers" or found.form["rope_parameters"]["rope_type"] == "default":
        forms.insert(0, data)  # what was saved knows more of the family than a verdict does
    for form in forms:
        (staging / "config.json").write_text(json.dumps(form, indent=2) + "\n", encoding="utf-8")
        if _stock_reads(staging, record, pairs, as_saved=form is data):
            break
    else:
        raise RopeExtendError(
            f"{record.encoding} cannot be exported to {found.target}: the config of this {record.model_type} "
            f"model does not carry its table {found.reason}; rope_extend.load reads it"
        )
    for path in sorted(source.iterdir()):
        hidden = path.name.startswith(".") or path.suffix in _LEFT_BEHIND
        if hidden or not path.is_file() or path.name in _WRITTEN_ANEW:
            continue
        _link(locate(source, path.name), staging / path.name)
    seal(staging, record)


def _link(path: Path, target: Path) -> None:
    """A second name for weights, which nothing here writes into; a copy of small files, which users edit."""
    if target.suffix == ".safetensors":
        with suppress(OSError):  # another disk, or one without links
            os.link(path, target)
            return
    shutil.copy2(path, target)


def _with_form(data: dict[str, Any], config: Any, form: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config.json` with the target's rotary parameters in it, wherever the family keeps them."""
    made: dict[str, Any] = copy.deepcopy(data)
    adapter = adapter_for(config.model_type)
    kind, part = adapter.layer_type(config), made
    for name in filter(None, adapter.config_path.split(".")):
        part = part[name]
    old = part["rope_parameters"]
    current = old if kind is None else old[kind]
    parameters = {key: current[key] for key in CARRIED if key in current} | form["rope_parameters"]
    if adapter.completes is not None:
        parameters = adapter.completes(parameters)
    part["rope_parameters"] = parameters if kind is None else {**old, kind: parameters}
    part["max_position_embeddings"] = form["max_position_embeddings"]
    original = parameters.get("original_max_position_embeddings")
    if original and part.get("original_max_position_embeddings"):  # Phi-3 gives it precedence
        part["original_max_position_embeddings"] = original
    if CONFIG_RECORD in made:
        made[CONFIG_RECORD]["rope_parameters"] = parameters
    return made


def _stock_pairs(directory: Path) -> list[int]:
    """How many pairs each rotary module has, those that rest among them."""
    return [len(table) for table, _ in rotary_tables(empty_model(str(directory)), 1)]


def _stock_reads(directory: Path, record: Record, pairs: list[int], *, as_saved: bool) -> bool:
    """Whether stock transformers computes the recorded schedule from a directory's config.

    A config as it was saved may let attention scale its logits by the rotary parameters, as DeepSeek's
    families do; one with other parameters would scale them otherwise.
    """
    encoding, lengths = record.encoding, (record.shape.trained_length, record.target_length)
    assert isinstance(encoding, RopeEncoding)
    try:
        model = empty_model(str(directory))
        if not as_saved and softmax_scale_of(model) is not None:
            return False
        return _stock_pairs(directory) == pairs and has_tables_of(model, encoding, record.shape, lengths)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        logger.debug("stock transformers does not take the config in %s: %s", directory, error)
        return False


def _verify(directory: Path, original: Path) -> None:
    from rope_extend.checkpoint.verifying import verify  # here, because it starts another process

    verification = verify(directory, reference=original)
    if verification.verdict != "equal":
        raise RopeExtendError(f"the export does not read as the original: {verification.reason}")
