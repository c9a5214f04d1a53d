"""Compares the number of processes that a launcher started with the number that found each other.

Every launcher sets its own environment variables, and `accelerate` reads few of them. If it misses them, each
process takes itself for the only one. Then eight runs silently write into one directory, or one process
silently does the work of eight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rope_extend.errors import RopeExtendError

_STARTED = {
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI)",
    "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH2)",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""The variables with the number of processes, by launchers that start processes without connecting them."""

_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets in every process, with which processes find each other."""

_REMEDY = (
    "Start them with torchrun --nproc-per-node N, on several machines with one torchrun on each "
    "(srun --ntasks-per-node 1 torchrun --nnodes ...)"
)


def check_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse an incomplete set of torchrun's variables: a process would wait for others, or ignore them.

    Call it before anything connects the processes.

    Raises:
        RopeExtendError: names the variables that are set, the missing ones, and what sets all.
    """
    numbers = {name: _number(environment, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    several = (numbers["WORLD_SIZE"] or 1) > 1
    # RANK alone means nothing: schedulers set it for their own purposes.
    if not several and numbers["LOCAL_RANK"] is None:
        return
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if numbers["WORLD_SIZE"] == 1:  # one process needs no address
        missing = [name for name in missing if not name.startswith("MASTER")]
    if missing:
        present = ", ".join(f"{name}={environment[name]}" for name in _TORCHRUN if environment.get(name))
        raise RopeExtendError(
            f"this process was started as one of several ({present}), but cannot find the others: "
            f"{', '.join(missing)} not set. {_REMEDY}; for a single process, unset the variables"
        )


def check_launch(processes: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to run as one of several processes that did not find each other.

    Args:
        processes: number of processes that found each other, as counted by `accelerate`.
        environment: the environment variables of this process.

    Raises:
        RopeExtendError: a launcher started more, or was asked for more; says what to do instead.
    """
    world = _number(environment, "WORLD_SIZE") or 1
    if processes < world:
        raise RopeExtendError(
            f"torchrun started {world} processes, but this one found {processes}: each would do the whole "
            "run, all in one directory. Without a GPU for each, set ACCELERATE_USE_CPU=true to run them on "
            "the CPU, or start one process"
        )
    # A launcher may start one torchrun on each machine, which then starts the other processes.
    connected = max(processes // world * (_number(environment, "GROUP_WORLD_SIZE") or world), 1)
    for variable, launcher in _STARTED.items():
        started = _number(environment, variable) or 1
        if started > connected:
            raise RopeExtendError(
                f"{launcher} started {started} processes ({variable}={started}), but only {connected} found "
                f"each other: each would do the whole run, all in one directory. {_REMEDY}. On CPUs with "
                "mpirun, set ACCELERATE_USE_CPU=true, and MASTER_ADDR to the first host"
            )
    if processes > 1:
        return
    tasks = _number(environment, "SLURM_NTASKS") or 1
    if tasks > 1 and "SLURM_STEP_NUM_TASKS" not in environment:
        raise RopeExtendError(
            f"the job has {tasks} tasks (SLURM_NTASKS={tasks}), but this process was started alone, without "
            f"srun or torchrun. {_REMEDY}; for a single process, use SLURM_NTASKS=1 rope-extend ..."
        )
    # accelerate launch sets both of these, the address only if asked for several processes or machines. In
    # the processes that it starts, it also sets WORLD_SIZE and RANK.
    asked = "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment
    if asked and "WORLD_SIZE" not in environment:
        raise RopeExtendError(
            "accelerate launch was asked for several processes, but started only this one. It does so on a "
            "CPU, and if there are fewer visible GPUs than processes. Use torchrun --nproc-per-node N (on a "
            "CPU with ACCELERATE_USE_CPU=true), or --num_processes 1"
        )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """The whole number in a variable; None if it is not set, or holds something else."""
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        return None
