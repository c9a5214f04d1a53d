"""What launchers say about the processes they started, against the processes that found each other.

Every launcher has variables of its own, and `accelerate` reads few of them. Where it misses them, each
process takes itself for the only one: eight runs of one process write into one directory, or one process
does the work that eight were asked for, and nothing says so.
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
"""Variables in which launchers that start processes, but do not connect them, say how many they started."""

_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun gives every process, and what connects it to the others."""

_REMEDY = (
    "Start them with torchrun --nproc-per-node N, on several machines with one torchrun on each "
    "(srun --ntasks-per-node 1 torchrun --nnodes ...)"
)


def check_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse half of torchrun's variables: with them a process would wait for others, or ignore them.

    Call it before anything connects the processes.

    Raises:
        RopeExtendError: naming what is set, what is missing, and what sets both.
    """
    numbers = {name: _number(environment, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    several = (numbers["WORLD_SIZE"] or 1) > 1
    # RANK alone says nothing: schedulers set it for ends of their own.
    if not several and numbers["LOCAL_RANK"] is None:
        return
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if numbers["WORLD_SIZE"] == 1:  # one process needs no address
        missing = [name for name in missing if not name.startswith("MASTER")]
    if missing:
        given = ", ".join(f"{name}={environment[name]}" for name in _TORCHRUN if environment.get(name))
        raise RopeExtendError(
            f"this process was started as one of several ({given}) and cannot find the others: "
            f"{', '.join(missing)} not set. {_REMEDY}; for a single process, unset the variables"
        )


def check_launch(processes: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to work as one of several processes that do not know of each other.

    Args:
        processes: how many found each other, as `accelerate` counts them.
        environment: the variables of this process.

    Raises:
        RopeExtendError: a launcher started more, or was asked for more, with what would work.
    """
    world = _number(environment, "WORLD_SIZE") or 1
    if processes < world:
        raise RopeExtendError(
            f"torchrun started {world} processes and this one finds {processes}: each would do the whole run "
            "by itself, in one directory. Without a GPU for each, set ACCELERATE_USE_CPU=true to run them on "
            "the CPU, or start one process"
        )
    # A launcher of processes may start one torchrun on each machine, which then starts the rest.
    connected = max(processes // world * (_number(environment, "GROUP_WORLD_SIZE") or world), 1)
    for variable, launcher in _STARTED.items():
        started = _number(environment, variable) or 1
        if started > connected:
            raise RopeExtendError(
                f"{launcher} started {started} copies ({variable}={started}) of which "
                f"{connected} found each other: each would do the whole run by itself, in one directory. "
                f"{_REMEDY}; on CPUs, ACCELERATE_USE_CPU=true with MASTER_ADDR, the first host, connects "
                "those of mpirun"
            )
    if processes > 1:
        return
    tasks = _number(environment, "SLURM_NTASKS") or 1
    if tasks > 1 and "SLURM_STEP_NUM_TASKS" not in environment:
        raise RopeExtendError(
            f"the job has {tasks} tasks (SLURM_NTASKS={tasks}) and this process was started alone, without "
            f"srun or torchrun. {_REMEDY}; if one process is meant, say so: SLURM_NTASKS=1 rope-extend ..."
        )
    # accelerate launch sets these two together, the address only if asked for several processes or machines;
    # with those that it starts itself come WORLD_SIZE and RANK.
    asked = "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment
    if asked and "WORLD_SIZE" not in environment:
        raise RopeExtendError(
            "accelerate launch was asked for several processes and started this one alone, as it does on a "
            "CPU and where fewer GPUs are visible than processes asked for. Use torchrun --nproc-per-node N, "
            "on a CPU with ACCELERATE_USE_CPU=true, or --num_processes 1"
        )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """A variable's whole number; None where it is not set, or holds something else."""
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        return None
