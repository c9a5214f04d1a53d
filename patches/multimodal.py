"""Text decoders inside multimodal models, one level below the model.

These tables do not rotate the encoders of images and sound. Mllama's layers that attend to the image do not
rotate either.
"""

from torch import nn

from rope_extend.models.families import Family, types


def of_text(attention: nn.Module) -> bool:
    """Whether a module is text attention: not in the audio encoder, and not attention to an image."""
    return not any(part in type(attention).__name__ for part in ("Audio", "Cross", "Vision"))


_NOTE = "the text decoder of a multimodal model"

FAMILIES = (
    Family(
        types("fuyu got_ocr2 moss_transcribe_diarize"),
        _NOTE,
        rotary_path="language_model.rotary_emb",
        rotates=of_text,
        config_path="text_config",
    ),
    Family(("mllama",), _NOTE, rotary_path="model.rotary_emb", rotates=of_text),
)
