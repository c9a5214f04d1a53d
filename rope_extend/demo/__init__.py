"""The bundled demonstration model: where it lies and which text it was trained, tuned and measured on."""

from pathlib import Path

from rope_extend.demo.corpus import (
    CorpusReport,
    PretrainingCorpus,
    RetrievalDocument,
    copied_line_fraction,
    evaluation_files,
    finetuning_files,
    held_out_files,
    key_value_document,
    passkey_document,
    pretraining_corpus,
    read_text,
    site_packages_dir,
    standard_library_dir,
)

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Directory of the bundled Llama checkpoint; `AutoModelForCausalLM.from_pretrained(MODEL_DIR)` loads it."""

__all__ = [
    "MODEL_DIR",
    "CorpusReport",
    "PretrainingCorpus",
    "RetrievalDocument",
    "copied_line_fraction",
    "evaluation_files",
    "finetuning_files",
    "held_out_files",
    "key_value_document",
    "passkey_document",
    "pretraining_corpus",
    "read_text",
    "site_packages_dir",
    "standard_library_dir",
]
