"""The window that a checkpoint reads already, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_extend.models.view import (
    config_record,
    current_window,
    layer_types_except_full_attention,
    rotary_part,
    window_of,
)


@dataclass(frozen=True)
class Window:
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
131,072 with YaRN and factor 4. The smaller models of these series are for 32,768 tokens. Qwen3's config says
40,960, which is 32,768 and a reserve for the answer. Qwen2.5-Math has 4,096 tokens, and another base.
"""


def window_of_config(config: Any) -> Window:
    """The window that a checkpoint reads, as its config states it.

    Args:
        config: a transformers config of a supported family.

    Raises:
        RopeExtendError: what rope_extend recorded in the config is damaged, or a window or a factor in the
            config is not a finite number above 0.
    """
    tokens = current_window(config)
    if config_record(config) is not None:
        return Window(tokens, "rope_extend has extended it")
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
        return Window(tokens, f"its config has {kind!r} scaling", local, scaled=True)
    least = _STANZAS.get(config.model_type)
    large = least is not None and config.hidden_size >= least
    stanza = large and tokens in (STANZA_ORIGINAL, 40_960) and parameters.get("rope_theta") == 1e6
    return Window(tokens, "its config says so, without scaling", local, stanza=stanza)
