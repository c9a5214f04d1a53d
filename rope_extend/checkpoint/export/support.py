"""Which encodings each export target supports, and how."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rope_extend.checkpoint.export.gguf import architecture_of, schedule
from rope_extend.checkpoint.export.served_remaps import remap_obstacle, served_keys
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.encodings import (
    Encoding,
    PlainRope,
    RemapEncoding,
    RopeEncoding,
    RopeShape,
    encoding_names,
    method_named,
)
from rope_extend.errors import RopeExtendError
from rope_extend.models.families import FamilyAdapter, find_adapter
from rope_extend.models.stock_config import DUAL_CHUNK_KEY

NATIVE = "native"
FACTORS = "exact by factors"
PLUGIN = "needs rope_extend"
IMPOSSIBLE = "impossible"
_UNKNOWN = "we do not know how it reads this family's rotary parameters"
_NO_LONGROPE = "the family's config does not accept longrope, which could hold its table"


@dataclass(frozen=True)
class Support:
    """Whether a target computes an encoding, and in which form.

    Attributes:
        target: one of `TARGETS`.
        verdict: `native`: the target has the method, or a simpler one with the same table; `exact by
        factors`:
            the target reads the table itself; `needs rope_extend`: only with `rope_extend.load`; or
            `impossible`.
        reason: the reason, as a phrase.
        form: what the export writes: metadata and tensors for llama.cpp, otherwise keys of `config.json`.
            None if the target does not support the encoding.
    """

    target: str
    verdict: str
    reason: str
    form: Mapping[str, Any] | None = None

    @property
    def possible(self) -> bool:
        """Whether the target computes the encoding without this library."""
        return self.form is not None


def support(
    encoding: Encoding,
    shape: RopeShape,
    target: str,
    model_type: str | None = None,
    *,
    target_length: int | None = None,
    target_version: str | None = None,
) -> Support:
    """Whether, and how, a target computes an encoding without this library.

    Args:
        encoding: the position encoding.
        shape: the rotary shape of the pretrained model.
        target: one of `TARGETS`.
        model_type: the family; default: one of Llama's shape.
        target_length: the extended window, in tokens; default: the encoding's own.
        target_version: the version of the target, such as `0.10`, which decides in a few cases.

    Raises:
        RopeExtendError: an unknown target, a version that is none, or an encoding that does not fit the
            shape.
    """
    if target not in TARGETS:
        raise RopeExtendError(f"export supports {', '.join(TARGETS)}, got {target!r}")
    if target_version is not None and not re.fullmatch(r"\d+\.\d+(\.\w+)*", target_version):
        raise RopeExtendError(f"target_version is a version such as 0.10 or 0.10.2, got {target_version!r}")
    obstacle = encoding.beyond_one_table(shape)
    if isinstance(encoding, RemapEncoding):
        return _for_remap(encoding, shape, target, model_type, target_length, target_version)
    if obstacle and not (target == "transformers" and encoding.per_row):
        return _refused(target, obstacle)
    assert isinstance(encoding, RopeEncoding)
    length = target_length or encoding.target_length(shape) or shape.trained_length
    adapter = find_adapter(model_type) if model_type else None
    if target == "transformers":
        return _for_transformers(encoding, shape, length, adapter, obstacle)
    if target == "llama.cpp":
        return _for_llama_cpp(encoding, shape, length, model_type)
    return _for_server(encoding, shape, length, adapter, target)


def gguf_refusal(encoding: Encoding, shape: RopeShape, model_type: str) -> Support | None:
    """Why no GGUF file of a family can hold an encoding, whatever the file's architecture; None if one may.

    Args:
        encoding: the position encoding.
        shape: the rotary shape of the pretrained model.
        model_type: the family.
    """
    reason = encoding.beyond_one_table(shape)
    if isinstance(encoding, RemapEncoding):
        reason = remap_obstacle(encoding, "llama.cpp", model_type, None)
    if not reason and _is_unknown(find_adapter(model_type)):
        reason = _UNKNOWN
    return _refused("llama.cpp", reason) if reason else None


def _is_unknown(adapter: FamilyAdapter | None) -> bool:
    """Whether a family has nested rotary parameters, or several kinds of them.

    We only know that transformers reads those.
    """
    return adapter is not None and bool(adapter.layer_types or adapter.config_path)


def _refused(target: str, reason: str) -> Support:
    return Support(target, PLUGIN if target == "transformers" else IMPOSSIBLE, reason)


def _simple_form(encoding: RopeEncoding, shape: RopeShape) -> dict[str, Any] | None:
    """The native form of an encoding; None if only a table describes it."""
    with suppress(RopeExtendError):
        form = encoding.rope_parameters(shape)
        if form["rope_type"] in ("default", encoding.rope_type):
            return form
    return None


def _native(target: str, form: Mapping[str, Any], window: int) -> Support:
    kind = form["rope_type"]
    reason = f"as base {form['rope_theta']:.6g}" if kind == "default" else f"type {kind}"
    return Support(target, NATIVE, reason, {"rope_parameters": form, "max_position_embeddings": window})


def _for_remap(
    encoding: RemapEncoding,
    shape: RopeShape,
    target: str,
    model_type: str | None,
    target_length: int | None,
    version: str | None,
) -> Support:
    if reason := remap_obstacle(encoding, target, model_type, version):
        return _refused(target, reason)
    length = target_length or encoding.target_length(shape) or shape.trained_length
    form = {"rope_parameters": PlainRope().rope_parameters(shape), "max_position_embeddings": length}
    return Support(target, NATIVE, f"by {DUAL_CHUNK_KEY}", {**form, **served_keys(encoding, length)})


def _for_transformers(
    encoding: RopeEncoding, shape: RopeShape, length: int, adapter: FamilyAdapter | None, obstacle: str
) -> Support:
    form, window = _simple_form(encoding, shape), encoding.max_position_embeddings(shape, length)

    def accepts(kind: str) -> bool:
        return adapter is None or adapter.accepts(kind)

    if form and accepts(form["rope_type"]):
        native = _native("transformers", form, window)
        if not obstacle:
            return native
        reason = (
            f"{native.reason}, by the longest row of a batch; beyond the trained window with use_cache=False"
        )
        return Support("transformers", NATIVE, reason, native.form)
    if obstacle:
        return _refused("transformers", obstacle)
    if not accepts("longrope"):
        return _refused("transformers", _NO_LONGROPE)
    form = {
        "rope_parameters": {**encoding.longrope_parameters(shape), "factor": 1.0},
        "max_position_embeddings": window,
    }
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
        if kind == "linear":  # both servers multiply the window in the config by the factor
            return _native(target, form, shape.trained_length)
        if kind == "llama3":
            return _native(target, form, length)
        yarn_scale = 0.1 * math.log(form.get("factor", 1.0)) + 1
        if kind == "yarn" and math.isclose(encoding.attention_factor(shape), yarn_scale, rel_tol=1e-9):
            form = {
                key: form[key] for key in form if key not in ("attention_factor", "mscale", "mscale_all_dim")
            }
            return _native(target, form, length)
    if adapter and not adapter.accepts("longrope"):
        return _refused(target, _NO_LONGROPE)
    if adapter and adapter.pairs == "neighbours":
        return _refused(
            target, "its longrope, which could hold the table, does not rotate neighbouring channels"
        )
    form = {**encoding.longrope_parameters(shape), "factor": 1.0}
    form |= {"short_mscale": form["attention_factor"], "long_mscale": form["attention_factor"]}
    if target == "sglang":  # then every position uses the same one of its two tables
        form["original_max_position_embeddings"] = length
    reason = "as longrope with equal lists, and the attention factor as short_mscale and long_mscale"
    return Support(target, FACTORS, reason, {"rope_parameters": form, "max_position_embeddings": length})


def _for_llama_cpp(encoding: RopeEncoding, shape: RopeShape, length: int, model_type: str | None) -> Support:
    if model_type and _is_unknown(find_adapter(model_type)):
        return _refused("llama.cpp", _UNKNOWN)
    architecture = None if model_type is None else architecture_of(model_type) or model_type
    try:
        content = schedule(encoding, shape, length, architecture)
    except RopeExtendError as error:
        return _refused("llama.cpp", str(error))
    form = {"keys": content.keys, "tensors": content.tensors}
    if content.tensors:
        reason = f"as {', '.join(content.tensors)} and rope.scaling.attn_factor"
        return Support("llama.cpp", FACTORS, reason, form)
    kind = content.keys["rope.scaling.type"]
    reason = f"as rope.freq_base {content.keys['rope.freq_base']:.6g}" if kind == "none" else f"type {kind}"
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


def support_values(
    rows: Sequence[Encoding],
    shape: RopeShape,
    *,
    model_type: str | None = None,
    target_length: int | None = None,
    target_version: str | None = None,
) -> list[dict[str, Any]]:
    """The contents of `support_table`, as plain values for JSON: one dict for each encoding and target."""
    options = {"target_length": target_length, "target_version": target_version}
    return [
        {"encoding": str(encoding), "target": target, "verdict": found.verdict, "reason": found.reason}
        for encoding in rows
        for target in TARGETS
        for found in [support(encoding, shape, target, model_type, **options)]  # type: ignore[arg-type]
    ]


def support_table(
    rows: Sequence[Encoding],
    shape: RopeShape,
    *,
    model_type: str | None = None,
    target_length: int | None = None,
    target_version: str | None = None,
    targets: Sequence[str] = TARGETS,
) -> str:
    """A Markdown table of encodings and targets, with the reasons numbered below it.

    Args:
        rows: encodings, one row each.
        shape: the rotary shape of the pretrained model.
        model_type: the family; default: one of Llama's shape.
        target_length: the extended window, in tokens; default: each encoding's own.
        target_version: the version of the targets, which decides in a few cases.
        targets: the columns.
    """
    reasons: dict[str, int] = {}
    lines = [f"| encoding | {' | '.join(targets)} |", "|---" * (len(targets) + 1) + "|"]
    for encoding in rows:
        cells = []
        for target in targets:
            cell = support(
                encoding, shape, target, model_type,
                target_length=target_length, target_version=target_version,
            )  # fmt: skip
            cells.append(f"{cell.verdict} ({reasons.setdefault(cell.reason, len(reasons) + 1)})")
        lines.append(f"| `{encoding}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())])
