"""The file `gpu.json`: every step that ran, with its figures, and the machine that it ran on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gpu.steps import Figure
from rope_extend.errors import RopeExtendError
from rope_extend.files import write_json
from rope_extend.report.versions import package_version, versions

FORMAT = 1
ROOT = Path(__file__).resolve().parents[2]


def machine(device: str) -> dict[str, str]:
    """The device and the versions of the software that figures depend on."""
    found = {"device": "CPU"}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found = {
            "device": properties.name,
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    packages = {name: package_version(name) for name in ("accelerate", "peft")}
    return {
        **found,
        **{name: version for name, version in versions().items() if name != "rope_extend"},
        **packages,
    }


@cache
def source_digest() -> str:
    """Twelve hex digits that identify the source of the package and of these measurements."""
    digest = hashlib.sha256()
    for folder in ("rope_extend", "patches", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class GpuRecord:
    """What has been measured, kept in a file that is written after each step.

    Args:
        path: path of the file; it need not exist.

    Attributes:
        machine: device and versions; empty before the first step.
        steps: by `section/step`: figures, seconds, source digest, and the error if the step failed.

    Raises:
        RopeExtendError: the file is not such a record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine: dict[str, str] = {}
        self.steps: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                known = content["format"] == FORMAT
                self.machine, self.steps = content["machine"], content["steps"]
            except (ValueError, KeyError, TypeError) as error:
                raise RopeExtendError(
                    f"{path.name} is not a record of make gpu: {error}; remove it"
                ) from error
            if not known:
                raise RopeExtendError(f"{path.name} has format {content['format']}, not {FORMAT}; remove it")

    def check_machine(self, present: dict[str, str]) -> None:
        """Refuse to add figures of another machine, or of other versions, to this record.

        Raises:
            RopeExtendError: names what differs.
        """
        names = sorted({*present, *self.machine})
        different = [
            f"{name} {self.machine.get(name)}, now {present.get(name)}"
            for name in names
            if self.machine and self.machine.get(name) != present.get(name)
        ]
        if different:
            raise RopeExtendError(
                f"{self.path.name} holds figures of another machine or other versions "
                f"({'; '.join(different)}); move it away, or give another directory with --output"
            )
        self.machine = present

    def is_done(self, name: str) -> bool:
        """Whether a step has run to its end."""
        return name in self.steps and self.steps[name]["error"] is None

    def add(self, name: str, figures: Iterable[Figure], seconds: float, error: str | None) -> None:
        """Record a step, and write the file."""
        self.steps[name] = {
            "figures": [{**asdict(figure), "passed": figure.passed} for figure in figures],
            "seconds": round(seconds, 1),
            "source": source_digest(),
            "error": error,
        }
        write_json(self.path, {"format": FORMAT, "machine": self.machine, "steps": self.steps})
