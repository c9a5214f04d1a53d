"""Text decoders inside multimodal models: a shape of another module, one level further down.

What sees or hears is not rotated by these tables. Mllama's layers that look at the image read its keys, not
the text's, and rotate none.
"""

from torch import nn

from rope_extend.families import FamilyAdapter


def of_text(attention: nn.Module) -> bool:
    """Not the audio encoder's, and not a layer of the decoder that attends to an image."""
    return not any(part in type(attention).__name__ for part in ("Audio", "Cross", "Vision"))


_NOTE = "the text decoder of a multimodal model"

ADAPTERS = (
    FamilyAdapter(
        model_types=("fuyu", "got_ocr2", "moss_transcribe_diarize"),
        rotary_paths=("language_model.rotary_emb",),
        note=_NOTE,
        rotates=of_text,
        config_path="text_config",
    ),
    FamilyAdapter(
        model_types=("mllama",),
        rotary_paths=("model.rotary_emb",),
        note=_NOTE,
        rotates=of_text,
    ),
)
