"""Several processes share the documents, with the results of a single process."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from several_processes import launch
from test_measurement import numbers

from rope_extend.cli.main import main
from rope_extend.evaluation.report_files import read_results

RUN = "import sys; from rope_extend.cli.main import main; main(sys.argv[1:])"


def torchrun(command: str) -> subprocess.CompletedProcess[str]:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m rope_extend"
    return subprocess.run(
        [sys.executable, *shlex.split(f"{launcher} {command} --device cpu")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def in_two_processes(command: str, where: Path) -> str:
    """What two forked processes print; raises AssertionError with their errors if one of them fails."""
    return launch(RUN, *shlex.split(f"{command} --device cpu"), where=where)


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_two_processes_give_the_results_of_one(work: Path, tmp_path: Path) -> None:
    """Three documents, so that the shares differ; two methods and the control; and one file of each."""
    command = f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16,64 --methods none,dynamic_ntk"
    main(shlex.split(f"{command} --device cpu --output {tmp_path / 'one'}"))
    ran = torchrun(f"{command} --output {tmp_path / 'two'}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("written:") == 1
    assert ran.stderr.count("plan: ") == 1
    one, two = (read_results(tmp_path / name) for name in ("one", "two"))
    assert [row.label for row in two] == ["none", "none, cropped to 32", "dynamic_ntk"]
    assert [numbers(row.result) for row in two] == [numbers(row.result) for row in one]
    lines = ((tmp_path / name / "cells.jsonl").read_text().splitlines()[1:] for name in ("one", "two"))
    alone, shared = (
        {each["cell"]: each["result"]["block_nll"] for each in map(json.loads, some)} for some in lines
    )
    assert alone == shared
    assert all(alone.values())
    assert [path.name for path in (tmp_path / "two").glob("cells*")] == ["cells.jsonl"]


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_processes_keep_finished_cells_and_resume_together(work: Path, tmp_path: Path) -> None:
    command = f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16,64 --methods linear"
    command += " --no-cropped"
    main(shlex.split(f"{command} --device cpu --output {tmp_path / 'whole'}"))
    output = tmp_path / "report"
    shutil.copytree(tmp_path / "whole", output)
    # The state after an interruption: the second process has finished its document, the first has not.
    identity, _, second, *_ = (output / "cells.jsonl").read_text().splitlines(keepends=True)
    for path in output.iterdir():
        path.unlink()
    (output / "cells.1.jsonl").write_text(identity + second)
    with pytest.raises(AssertionError, match="--resume"):
        in_two_processes(f"{command} --output {output}", tmp_path)
    in_two_processes(f"{command} --output {output} --resume", tmp_path)
    assert second in (output / "cells.jsonl").read_text().splitlines(keepends=True)  # with its time
    assert sorted(path.name for path in output.glob("cells*")) == ["cells.jsonl"]
    whole, resumed = (read_results(path)[0].result for path in (tmp_path / "whole", output))
    assert numbers(resumed) == numbers(whole)
