"""Checkpoints that carry their encoding."""

from rope_extend.checkpoint.record import (
    RECORD_NAME,
    SCHEMA_VERSION,
    Record,
    library_versions,
    read_record,
    write_record,
)
from rope_extend.checkpoint.saving import load, load_adapter, save, undone_on_failure

__all__ = [
    "RECORD_NAME",
    "SCHEMA_VERSION",
    "Record",
    "library_versions",
    "load",
    "load_adapter",
    "read_record",
    "save",
    "undone_on_failure",
    "write_record",
]
