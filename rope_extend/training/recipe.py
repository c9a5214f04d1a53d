"""The single description of a fine-tuning run, from YAML or flags, checked before anything is loaded.

The module imports neither torch nor transformers, so that `rope-extend finetune --help` answers quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import Annotated, Any, ClassVar

from rope_extend.checks import FLAG, Kind, choice, integer, number
from rope_extend.config import (
    AUTO,
    COUNT,
    LENGTH,
    LENGTHS,
    MODEL,
    PARAMETERS,
    PATH,
    POSITIVE_COUNT,
    SOURCES,
    TEXT,
    Config,
    items,
    or_auto,
)
from rope_extend.data.choices import CONSECUTIVE, RESTART, SAMPLED, SHORTEST, UNPACKED
from rope_extend.errors import refuse_if
from rope_extend.method_names import PRETRAINED, STARTS, check_method_name, check_start


def _names(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(TEXT.parse, items(value))))


def _targets(value: Any) -> str | tuple[str, ...]:
    return str(value) if value in ("attention", "all-linear", FULL) else _names(value)


_TARGETS = Kind("attention, all-linear, none, or a list of module names", _targets)
_TRACKERS = Kind("a list of trackers, such as [wandb, mlflow]", lambda value: _names(value) if value else ())

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_8bit")
"""Names of `TrainingArguments.optim` whose memory the plan knows."""
FULL = "none"
"""The value of `lora_targets` that trains all weights instead of an adapter."""
BY_METHOD: Any = None
"""The default of fields that depend on others; a recipe that is made holds the value that follows."""
STEPS = 400
"""The YaRN paper's steps (2309.00071), there with 64 sequences each; `advise` starts from them, too."""
_REPLACED = "encodings that replace RoPE"
"""They must relearn position. Other methods leave a model most of what it knows."""
_DEFAULTS = {
    "steps": (STEPS, 2000, _REPLACED),
    "lora_targets": ("attention", "all-linear", _REPLACED),
    "train_norm_embed": (False, True, _REPLACED),
    "learning_rate": (2e-4, 2e-5, "all weights"),
}
"""By field, the usual default, another one, and what that is for."""


@dataclass(frozen=True)
class Recipe(Config):
    """One run for a longer context window: the model, the data, the optimization, and the output.

    The defaults are those of position interpolation (2306.15595, section 3.1): AdamW with betas 0.9 and
    0.95, no weight decay, 20 steps of linear warm-up from a tenth of the learning rate, then constant.
    Three defaults differ from the paper:

    - It updates all weights at 2e-5, as `lora_targets: none` does. The default of LoRA is ten times that,
      because its update is the product of two small matrices of which one starts at zero.
    - It takes 1,000 steps, but was below the original perplexity after 200. Here they are `STEPS`.
    - Its batch is 64 sequences on 32 GPUs. Here it is `batch_size * gradient_accumulation` = 8 per device.

    Encodings that replace RoPE need more training. For them, the fields `steps`, `lora_targets` and
    `train_norm_embed` have other defaults.

    Lengths are in tokens and may be written as `32k` for 32,768. Every value is checked when the recipe is
    made.

    Raises:
        RopeExtendError: a value of the wrong type or outside its range, an unknown method or method
            parameter, or two fields that contradict each other.
    """

    label: ClassVar[str] = "recipe"
    examples: ClassVar[str] = "`rope-extend recipes`"
    flags: ClassVar[Mapping[str, str]] = {"output_dir": "--output"}
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "method": ("method", "method_parameters", "start", "current_length", "trained_length"),
        "data and blocks": (
            "block_length", "positions", "packing", "mixed_windows", "short_share", "text_column", "split",
            "max_documents",
        ),
        "optimization": (
            "steps", "batch_size", "gradient_accumulation", "learning_rate", "warmup_steps", "optim", "seed",
        ),
        "LoRA and what is trained": (
            "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "train_norm_embed",
        ),
        "memory": (
            "dtype", "quantize", "gradient_checkpointing", "mlp_tiles", "offload_checkpoints", "split_window",
        ),
        "evaluation": ("eval_data", "eval_lengths", "eval_every", "eval_documents", "eval_split"),
        "checkpoints and logs": ("save_every", "keep_checkpoints", "trackers"),
    }  # fmt: skip

    model: Annotated[str, MODEL, "pretrained model: a local directory or a hub id"]
    data: Annotated[
        str | tuple[str, ...], SOURCES, "long documents: a directory, file, glob, a list of them, or hub id"
    ]
    output_dir: Annotated[str, PATH, "directory of the run: adapter, record, recipe, metrics, checkpoints"]
    target_length: Annotated[
        int, LENGTH, "the context window to reach, in tokens; the method's factor follows from it"
    ]
    method: Annotated[
        str,
        TEXT,
        "position encoding: a name of `rope-extend methods`, or composed, as in resonance(yarn); none trains "
        "without an extension",
    ] = "yarn"
    method_parameters: Annotated[
        dict[str, Any], PARAMETERS, "parameters of the method, such as beta_fast=32, except factor"
    ] = field(default_factory=dict)
    start: Annotated[
        str, choice(*STARTS), "extend the pretrained RoPE, or the current table from the window that it reads"
    ] = PRETRAINED
    current_length: Annotated[
        int | None, LENGTH, "with start current: the window that it reads, in tokens, if the config is wrong"
    ] = None
    trained_length: Annotated[
        int | None, LENGTH, "the pretrained window, in tokens, if the model's config is wrong"
    ] = None
    block_length: Annotated[
        int | None, LENGTH, "tokens per training sequence; target_length if not given"
    ] = None
    positions: Annotated[
        str, choice(CONSECUTIVE, *SAMPLED), "pose, cream and random spread a short block over target_length"
    ] = CONSECUTIVE
    packing: Annotated[
        str, choice(UNPACKED, RESTART), "restart packs short documents, attended to alone; none drops them"
    ] = UNPACKED
    mixed_windows: Annotated[
        bool, FLAG, "mix long blocks with short documents under the table of the trained window (2502.20082)"
    ] = False
    short_share: Annotated[
        float, number(0, above=True, below=1), "with mixed_windows, the share of blocks of short documents"
    ] = 0.3
    steps: Annotated[int, POSITIVE_COUNT, "optimizer steps"] = BY_METHOD
    batch_size: Annotated[int, POSITIVE_COUNT, "sequences per device in one forward pass"] = 1
    gradient_accumulation: Annotated[int, POSITIVE_COUNT, "forward passes per optimizer step"] = 8
    learning_rate: Annotated[float, number(0, above=True), "learning rate after warm-up, constant"] = (
        BY_METHOD
    )
    warmup_steps: Annotated[int, COUNT, "steps of linear warm-up from a tenth of the learning rate"] = 20
    optim: Annotated[
        str, choice(*OPTIMIZERS), "AdamW of torch, its fused kernel, or with moments of 8 bits (bitsandbytes)"
    ] = OPTIMIZERS[0]
    lora_rank: Annotated[int, POSITIVE_COUNT, "rank of the LoRA matrices"] = 16
    lora_alpha: Annotated[float, number(0, above=True), "LoRA updates are scaled by alpha / rank"] = 32.0
    lora_dropout: Annotated[float, number(0, below=1), "dropout on the input of the LoRA matrices"] = 0.0
    lora_targets: Annotated[
        str | tuple[str, ...], _TARGETS, "layers with LoRA, or names of modules; none trains all weights"
    ] = BY_METHOD
    train_norm_embed: Annotated[
        bool, FLAG, "also train norms and embeddings, which helps beyond about 4x (2309.12307)"
    ] = BY_METHOD
    dtype: Annotated[
        str,
        choice("auto", "float32", "bfloat16"),
        "dtype of computation and of the frozen weights; trained weights are float32. auto is bfloat16 on a "
        "GPU that supports it, and float32 elsewhere",
    ] = "auto"
    seed: Annotated[
        int, integer(0, 2**31), "seed of the LoRA matrices, the order of the data, and dropout"
    ] = 0
    eval_data: Annotated[str | tuple[str, ...] | None, SOURCES, "documents to evaluate on during the run"] = (
        None
    )
    eval_lengths: Annotated[
        tuple[int, ...] | None, LENGTHS, "windows to evaluate at (default: the doublings of the trained one)"
    ] = None
    eval_every: Annotated[int, COUNT, "steps between evaluations; 0 evaluates only before and after"] = 0
    eval_documents: Annotated[int, POSITIVE_COUNT, "number of documents of eval_data to use"] = 16
    save_every: Annotated[int, COUNT, "steps between checkpoints; 0 saves only the last"] = 100
    keep_checkpoints: Annotated[
        int, POSITIVE_COUNT, "number of checkpoints to keep; an older one is used if the newest is damaged"
    ] = 2
    gradient_checkpointing: Annotated[
        bool | str, or_auto(FLAG), "recompute each layer, about 1/3 slower; auto: only if a step needs it"
    ] = AUTO
    mlp_tiles: Annotated[
        int | str, or_auto(COUNT), "tokens that an MLP computes at a time, 0 for all; auto: as a step needs"
    ] = AUTO
    offload_checkpoints: Annotated[
        bool | str, or_auto(FLAG), "keep the inputs of recomputed layers in host memory; auto: if needed"
    ] = AUTO
    split_window: Annotated[
        int, POSITIVE_COUNT, "processes that share each block, each with a part of it; start them by torchrun"
    ] = 1
    quantize: Annotated[
        str | None, choice("4bit"), "quantize the frozen weights on load (NF4, by bitsandbytes)"
    ] = None
    trackers: Annotated[
        tuple[str, ...], _TRACKERS, "trackers of Trainer that also get the metrics, such as [wandb, mlflow]"
    ] = ()
    text_column: Annotated[str, TEXT, "column of the text, for tabular data"] = "text"
    split: Annotated[str, TEXT, "split of a hub dataset to train on"] = "train"
    eval_split: Annotated[str, TEXT, "split of a hub dataset to evaluate on"] = "validation"
    max_documents: Annotated[
        int | None, POSITIVE_COUNT, "number of documents of data to use; all if not given"
    ] = None

    def check_early(self) -> None:
        """Check the name of the method, and fields that belong together; imports nothing.

        Raises:
            RopeExtendError: an unknown method, or values that contradict each other.
        """
        check_method_name(self.method)
        check_start("recipe", self.start, self.current_length)
        sampled = self.positions != CONSECUTIVE
        ways = {
            "mixed_windows": self.mixed_windows, f"positions {self.positions}": sampled,
            f"packing {self.packing}": self.packing != UNPACKED,
        }  # fmt: skip
        several = " and ".join(name for name, given in ways.items() if given)
        contradictions = {
            f"block_length {self.length} is greater than target_length {self.target_length}; raise "
            "target_length, or leave block_length out": self.length > self.target_length,
            f"short_share {self.short_share:g} needs mixed_windows; set mixed_windows, or leave short_share "
            "out": self.short_share != type(self).short_share and not self.mixed_windows,
            f"{several} cannot be combined, because each says what a block holds; leave all but one out": (
                sum(ways.values()) > 1
            ),
            f"positions {self.positions} spreads short blocks over target_length {self.target_length}, but "
            f"block_length is {self.length}; set block_length to less than target_length, such as the "
            f"pretrained window, and to {SHORTEST} tokens or more": (
                sampled and not SHORTEST <= self.length < self.target_length
            ),
            "offload_checkpoints keeps the inputs of recomputed layers in host memory, but "
            "gradient_checkpointing is false; set it to true or auto": (
                self.offload_checkpoints is True and self.gradient_checkpointing is False
            ),
            "lora_targets none trains all weights, but quantize and lora_dropout are for LoRA; leave them "
            "out, or name layers": self.full and bool(self.quantize or self.lora_dropout),
            "eval_every and eval_lengths need eval_data; name documents to evaluate on": (
                self.eval_data is None and (self.eval_every > 0 or self.eval_lengths is not None)
            ),
        }
        for problem, given in contradictions.items():
            refuse_if(given, f"{self.label}: {problem}")

    @property
    def length(self) -> int:
        """Tokens per training sequence: `block_length`, or else `target_length`."""
        return self.target_length if self.block_length is None else self.block_length

    @property
    def full(self) -> bool:
        """Whether all weights are trained, without LoRA."""
        return self.lora_targets == FULL

    @property
    def packs(self) -> bool:
        """Whether some blocks hold several documents."""
        return self.packing != UNPACKED or self.mixed_windows

    def computed_defaults(self) -> Mapping[str, Any]:
        """Defaults of the fields that depend on others; also checks the method's parameters."""
        from rope_extend.encodings import method_named  # imports torch

        method = method_named(self.method)
        method.split_parameters(self.method_parameters)
        others = {_REPLACED: method.replaces_rotation, "all weights": self.full}
        return {name: other if others[of] else usual for name, (usual, other, of) in _DEFAULTS.items()}

    @classmethod
    def default_text(cls, item: Field[Any]) -> str | None:
        """The default of a field for help, with both values of a field that depends on others."""
        if item.name not in _DEFAULTS:
            return super().default_text(item)
        usual, other, of = _DEFAULTS[item.name]
        return f"{usual}; {other} for {of}"
