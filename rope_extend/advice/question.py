"""What was asked of `advise`, with the parts of the answer that are known from the config."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from rope_extend.advice.windows import Window
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.encodings import Encoding, RopeShape, method_named
from rope_extend.method_names import CURRENT, PRETRAINED
from rope_extend.models.current_table import CurrentTable, extended_again
from rope_extend.units import format_length


@dataclass(frozen=True)
class Question:
    """What was asked, with the parts of the answer that are known from the config."""

    model: str
    model_type: str
    window: Window
    target: int
    engine: str | None
    shape: RopeShape
    stated: int | None
    quantized: bool
    current: CurrentTable | None = None
    """The table to start from, if the model was trained under scaling."""

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

    def measuring(self, methods: list[str], run: str | None = None) -> tuple[str, ...]:
        """The commands that measure perplexity and passkeys with their control, of methods or of a run."""
        window, target = format_length(self.extended), format_length(self.target)
        stated = f" --trained-length {format_length(self.stated)}" if self.stated else ""
        named, data = f"--methods {','.join(methods)}", "--data path/to/long/documents"
        evaluate, output = f"rope-extend evaluate {quote(self.model)}", run or "untrained"
        adapter = f" {quote(run)}" if run else ""
        what = f"{named} --lengths {window},{target}{stated}"
        perplexity = f"{data} --output {quote(output + '-perplexity')}"
        retrieve = f"rope-extend retrieve {quote(self.model)}{adapter} {what}"
        retrieve += f" --output {quote(output + '-passkeys')}"
        if self.current is None:
            return f"{evaluate}{adapter} {what} {perplexity}", retrieve
        # The control of `evaluate` is plain RoPE cropped to the pretrained window, which is another model.
        cropped = f"--protocol cropped --window {window} --lengths {target}{stated}"
        return (
            f"{evaluate}{adapter} {what} --no-cropped {perplexity}",
            f"{evaluate} {named} {cropped} --no-cropped {data} --output {quote(output + '-cropped')}",
            retrieve,
        )
