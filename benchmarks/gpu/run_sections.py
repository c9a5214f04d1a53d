"""The command behind `make gpu`: runs sections, resumes them, and writes the record and its page."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is imported late
    from gpu.gpu_record import GpuRecord
    from gpu.steps import Figure, Setting

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "transformers", "accelerate", "peft", "safetensors", "numpy")
SECTIONS = ("tests", "kernels", "evaluator", "training", "retrieval", "nccl")
LIMIT = 540
"""Seconds of a section. A step that would not end before is left to the next start."""
PATIENCE = 45
"""Seconds beyond the limit after which a step that takes much longer than usual is stopped."""
INTERRUPTED = "interrupted, or stopped because it took too long"
"""What is recorded of a step until it ends."""
LEAST_MEMORY = 78e9
"""Bytes that the device must have free: a card of 80 GB."""
WRONG_USE, FAILED, UNFINISHED = 2, 1, 3
"""Exit status: nothing could run; a step failed or a target was missed; steps are left for the next start."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="make gpu",
        description="Check and measure everything on a CUDA device, in sections that can be resumed.",
    )
    parser.add_argument("--section", choices=SECTIONS, help="run this section alone, in this process")
    parser.add_argument(
        "--dry", action="store_true", help="run every step at a tiny shape on the CPU; no record"
    )
    parser.add_argument("--again", action="store_true", help="measure again what is recorded already")
    parser.add_argument(
        "--output", type=Path, help="directory for gpu.json and gpu.md (default: this checkout and its docs)"
    )
    chosen = parser.parse_args(arguments)
    if problem := _missing(chosen.dry):
        print(f"make gpu: {problem}", file=sys.stderr)
        return WRONG_USE
    if chosen.dry and chosen.output is None:
        with tempfile.TemporaryDirectory() as directory:
            chosen.output = Path(directory)
            return _run(chosen)
    return _run(chosen)


def _missing(dry: bool) -> str | None:
    """What this machine lacks, in one line; None if nothing."""
    packages = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if packages:
        return f"{sys.executable} lacks {', '.join(packages)}; choose another Python with GPU_PYTHON=..."
    if dry:
        return None
    import torch

    from rope_extend.memory.segments import expand_segments

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} of {sys.executable} finds no CUDA device; use a machine with one, "
            "a CUDA build of torch (GPU_PYTHON=...), or DRY=1"
        )
    expand_segments("auto")  # before anything initialises CUDA
    free = torch.cuda.mem_get_info()[0]
    if free < LEAST_MEMORY:
        return (
            f"{torch.cuda.get_device_name()} has {free / 1e9:.0f} GB free, but {LEAST_MEMORY / 1e9:.0f} GB "
            "are needed; end other programs, or use a larger device"
        )
    return None


def _run(chosen: argparse.Namespace) -> int:
    from gpu.gpu_record import GpuRecord, machine
    from gpu.steps import DRY, FULL
    from rope_extend.errors import RopeExtendError

    logging.getLogger("rope_extend").setLevel(logging.ERROR)  # hide what a patch tells users
    setting = DRY if chosen.dry else FULL
    places = (ROOT / "gpu.json", ROOT / "docs" / "gpu.md")
    if chosen.output is not None:
        chosen.output.mkdir(parents=True, exist_ok=True)
        places = (chosen.output / "gpu.json", chosen.output / "gpu.md")
    try:
        record = GpuRecord(places[0])
        record.check_machine(machine(setting.device))
    except RopeExtendError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return WRONG_USE
    names = [chosen.section] if chosen.section else SECTIONS
    if chosen.section is None and not chosen.dry:  # each in a process of its own, whose memory is its own
        return max(_in_a_process(name, chosen) for name in names)
    return max(_section(name, setting, record, places[1], chosen.again) for name in names)


def _in_a_process(name: str, chosen: argparse.Namespace) -> int:
    command = [sys.executable, str(Path(__file__).parent), "--section", name]
    command += ["--again"] if chosen.again else []
    command += ["--output", str(chosen.output)] if chosen.output else []
    status = subprocess.run(command, check=False).returncode
    return status if status >= 0 else FAILED


def _module(section: str) -> ModuleType:
    return importlib.import_module(f"gpu.section_{section}")


def write_page(record: GpuRecord, path: Path) -> None:
    """Write the page of a record."""
    from gpu.gpu_page import page
    from rope_extend.files import write_text

    modules = {name: _module(name) for name in SECTIONS}
    sections = {name: (each.SUBJECT, [step.name for step in each.STEPS]) for name, each in modules.items()}
    write_text(path, page(record, sections))


def _section(section: str, setting: Setting, record: GpuRecord, path: Path, again: bool) -> int:
    """Run the steps of a section that are not recorded yet."""
    from gpu.steps import free_cache

    started, status = time.perf_counter(), 0
    for step in _module(section).STEPS:
        name = f"{section}/{step.name}"
        if record.is_done(name) and not again:
            print(f"{name}: recorded already")
            continue
        left = LIMIT - (time.perf_counter() - started)
        if not setting.dry and step.seconds > left:
            print(f"{name}: not enough time is left; run make gpu SECTION={section} once more")
            return max(status, UNFINISHED)
        print(f"{name}: about {step.seconds:.0f} s" if not setting.dry else name, flush=True)
        if not setting.dry:
            faulthandler.dump_traceback_later(left + PATIENCE, exit=True, file=sys.__stderr__)
        figures, error, begun = [], None, time.perf_counter()
        record.add(name, figures, 0.0, INTERRUPTED)
        try:
            for figure in step.run(setting):
                figures.append(figure)
                record.add(name, figures, time.perf_counter() - begun, INTERRUPTED)
                print(f"  {_line(figure)}", flush=True)
        except Exception as problem:  # any failure is a result; the next steps may still be right
            logging.getLogger(__name__).exception("%s failed", name)
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
            print(f"  failed: {error}", flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
        record.add(name, figures, time.perf_counter() - begun, error)
        write_page(record, path)
        if error is not None or any(figure.passed is False for figure in figures):
            status = FAILED
        free_cache()
    return status


def _line(figure: Figure) -> str:
    """A figure as a line."""
    value = "not measured" if figure.value is None else f"{figure.value:.4g} {figure.unit}".strip()
    verdict = {True: "  pass", False: "  FAIL", None: ""}[figure.passed]
    return f"{figure.name}: {value}{verdict}" + (f" ({figure.note})" if figure.note else "")
