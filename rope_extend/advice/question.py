"""What was asked of `advise`: the model, the window that it reads already, by its config, and the target."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import Any

from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.export.targets import TARGETS, commands
from rope_extend.encodings import Encoding, RopeShape, composed_name, method_named
from rope_extend.method_names import CURRENT, PRETRAINED
from rope_extend.models.config_facts import (
    config_record,
    current_window,
    layer_types_except_full_attention,
    rotary_part,
    window_of,
)
from rope_extend.models.current_table import CurrentTable, extended_again
from rope_extend.models.gguf_checkpoint import CONVERT, gguf_file
from rope_extend.units import format_length

LONG_TEXTS = "path/to/long/documents"
"""Stands for what was not given."""


def data_flags(data: tuple[str, ...]) -> str:
    """`--data` for each of the texts that were given."""
    return " ".join(f"--data {quote(each)}" for each in data or (LONG_TEXTS,))


@dataclass(frozen=True)
class CurrentWindow:
    """What a checkpoint reads without any change.

    Attributes:
        tokens: the window.
        source: how the config says so, as a phrase.
        local: if no layer attends to the whole window: how many tokens a layer sees; otherwise None.
        scaled: whether the config has scaling that does not come from rope_extend.
        stanza: whether the card of the model recommends YaRN without training, over `STANZA_ORIGINAL` tokens.
    """

    tokens: int
    source: str
    local: int | None = None
    scaled: bool = False
    stanza: bool = False


STANZA_ORIGINAL, STANZA_LONGEST = 32_768, 131_072
_STANZAS = {"qwen2": 3584, "qwen3": 2560, "qwen3_moe": 2048}
"""Families whose model cards give a YaRN stanza for 4 times the window, and the least hidden size of those.

The cards of Qwen2 and Qwen2.5 with 7B and more, and of Qwen3 with 4B and more: 32,768 tokens natively, and
131,072 with YaRN and factor 4. The smaller models of these series are for 32,768 tokens. Qwen2.5-Math has
4,096 tokens, and another base.
"""


def window_of_config(config: Any) -> CurrentWindow:
    """The window that a checkpoint reads, as its config states it.

    Args:
        config: a transformers config of a supported family.

    Raises:
        RopeExtendError: what rope_extend recorded in the config is damaged, or a window or a factor in the
            config is not a finite number above 0.
    """
    tokens = current_window(config)
    if config_record(config) is not None:
        return CurrentWindow(tokens, "rope_extend has extended it")
    _, parameters = rotary_part(config)
    kind = parameters.get("rope_type", "default")
    text = config.get_text_config(decoder=True)
    types = set(getattr(text, "layer_types", None) or ())
    partial = layer_types_except_full_attention(text)
    # A layer type without a window, such as linear attention, sees all tokens.
    sizes = [size for name in partial if (size := window_of(text, name)) is not None]
    local = max(sizes) if sizes and len(sizes) == len(partial) and "full_attention" not in types else None
    local = local if local is not None and local < tokens else None
    if kind != "default":
        return CurrentWindow(tokens, f"its config has {kind!r} scaling", local, scaled=True)
    least = _STANZAS.get(config.model_type)
    large = least is not None and config.hidden_size >= least
    stanza = large and tokens == STANZA_ORIGINAL and parameters.get("rope_theta") == 1e6
    stated = rotary_part(config)[0].max_position_embeddings
    rest = "so" if stated == tokens else f"{stated:,}, with a reserve for the answer"
    return CurrentWindow(tokens, f"its config says {rest}, without scaling", local, stanza=stanza)


@dataclass(frozen=True)
class Question:
    """What was asked, with the parts of the answer that are known from the config."""

    model: str
    model_type: str
    window: CurrentWindow
    target: int
    engine: str | None
    shape: RopeShape
    stated: int | None
    quantized: bool
    current: CurrentTable | None = None
    """The table to start from, if the model was trained under scaling."""
    data: tuple[str, ...] = ()
    """Long documents, if some were given."""

    @property
    def start(self) -> str:
        """What is extended, as a recipe's `start`: plain RoPE, or the model's scaling."""
        return PRETRAINED if self.current is None else CURRENT

    @property
    def extended(self) -> int:
        """The window that is extended, in tokens."""
        return self.shape.trained_length if self.current is None else self.current.shape.trained_length

    @property
    def factor(self) -> float:
        """Target divided by the window that is extended."""
        return self.target / self.extended

    def encoding(self, method: str) -> Encoding:
        """The encoding of a method for the target."""
        if self.current is not None:
            return extended_again(self.current, method_named(method), self.target, {})
        return method_named(method).for_target(self.shape, self.target)

    def engines(self, method: str) -> tuple[str, ...]:
        """The engines that compute a method without rope_extend, as far as we know."""
        encoding = self.encoding(method)
        return tuple(
            name
            for name in TARGETS
            if support(encoding, self.shape, name, self.model_type, target_length=self.target).possible
        )

    def serving(self, method: str, run: str | None) -> tuple[str, ...]:
        """The commands with which the engine serves a method, or the adapter of a run, if one was chosen.

        Every command states the window, so that training and serving agree.
        """
        if (engine := self.engine) is None:
            return ()
        form = support(self.encoding(method), self.shape, engine, self.model_type, target_length=self.target)
        if not form.possible:
            return (f"# {engine} does not run {method} of this family: {form.reason}",)
        lines, model, base, checkpoint = list[str](), self.model, "", run or "extended"
        if gguf_file(model) is not None:  # merging and the servers need a checkpoint
            model = base = f"{run}-base" if run else "converted"
            lines.append(f"{CONVERT} {quote(self.model)} --dtype bfloat16 --output {quote(base)}")
        if run is None:
            base, stated = "", f", trained_length={self.stated}" if self.stated else ""
            lines.append(
                f"# in Python, with the model of {model}: rx.extend(model, {self.target}, "
                f"{method!r}{stated}); rx.save(model, 'extended', tokenizer)"
            )
        elif TARGETS[engine].reads == "gguf":
            option, checkpoint = f" --base-model {quote(base)}" if base else "", f"{run}-merged"
            lines.append(f"rope-extend merge {quote(run)}{option} --output {quote(checkpoint)}")
            base = ""
        return (*lines, *commands(engine, checkpoint, self.target, base_model=base))

    def measuring(self, methods: list[str], run: str | None = None) -> tuple[str, ...]:
        """The commands that measure perplexity and passkeys with their control, of methods or of a run."""
        window, target = format_length(self.extended), format_length(self.target)
        stated = f" --trained-length {format_length(self.stated)}" if self.stated else ""
        named = f"--methods {','.join(methods)}"
        data = data_flags(("path/to/other/documents",) if run else self.data)
        model, output = quote(self.model), run or "untrained"
        adapter = f" {quote(run)}" if run else ""
        control = f" {quote(f'{run}-control')}" if run else ""
        what = f"{named} --lengths {window},{target}{stated}"
        if self.current is None:
            report = f"rope-extend report {model}{adapter}{control} --target-length {target} {what} {data}"
            return (f"{report} --output {quote(f'{output}-report')}",)
        evaluate, perplexity = f"rope-extend evaluate {model}", quote(f"{output}-perplexity")
        # The control of `evaluate` is plain RoPE cropped to the pretrained window, which is another model.
        row = f"--row {quote(composed_name(self.encoding('yarn')) + ' + LoRA')}"  # also that of its control
        cropped = quote(f"{output}-cropped")
        how = f"--protocol cropped --window {window} --lengths {target}{stated} --no-cropped"
        return (
            f"{evaluate}{adapter} {what} --no-cropped {data} --output {perplexity}",
            f"{evaluate}{control} {named} {how} {data} --output {cropped}",
            f"rope-extend compare {cropped} {perplexity} {row} {row}",
            f"rope-extend retrieve {model}{adapter} {what} --output {quote(f'{output}-passkeys')}",
        )
