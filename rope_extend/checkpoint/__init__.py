"""Checkpoints that carry their encoding."""

from rope_extend.checkpoint.callback import SaveEncodingCallback, record_encoding
from rope_extend.checkpoint.manifest import RECORD_NAME, base_fingerprint, check_directory
from rope_extend.checkpoint.record import (
    SCHEMA_VERSION,
    Record,
    library_versions,
    read_record,
    seal,
    write_record,
)
from rope_extend.checkpoint.saving import load, load_adapter, save, undone_on_failure

__all__ = [
    "RECORD_NAME",
    "SCHEMA_VERSION",
    "Record",
    "SaveEncodingCallback",
    "base_fingerprint",
    "check_directory",
    "library_versions",
    "load",
    "load_adapter",
    "read_record",
    "record_encoding",
    "save",
    "seal",
    "undone_on_failure",
    "write_record",
]
