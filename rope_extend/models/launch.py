"""Compares the number of processes that a launcher started with the number that found each other.

Each launcher sets its own environment variables, and `accelerate` reads few of them. If it misses them, each
process takes itself for the only one. Then one process does the work of eight, or eight do all of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rope_extend.errors import RopeExtendError

_STARTED = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI)",
    "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH2)",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""The variables with the number of processes, by what starts them."""

_REMEDY = (
    "Start them with torchrun --nproc-per-node N, on several machines with one torchrun on each "
    "(srun --ntasks-per-node 1 torchrun --nnodes ...). On CPUs, set ACCELERATE_USE_CPU=true, and with mpirun "
    "MASTER_ADDR to the first host"
)


def check_launch(processes: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to run as one of several processes that did not find each other.

    Args:
        processes: number of processes that found each other.

    Raises:
        RopeExtendError: a launcher started more, or was asked for more; says what to do instead.
    """
    world = _number(environment, "WORLD_SIZE")
    # A launcher may start one torchrun on each machine, which then starts the other processes.
    connected = max(processes // world * _number(environment, "GROUP_WORLD_SIZE", world), 1)
    for variable, launcher in _STARTED.items():
        started = _number(environment, variable)
        found = processes if variable == "WORLD_SIZE" else connected
        if started > found:
            raise RopeExtendError(
                f"{launcher} started {started} processes ({variable}={started}), but only {found} found each "
                f"other: each would do the whole run, all in one directory. {_REMEDY}"
            )
    # accelerate launch sets both of these, the address only if asked for several processes or machines. In
    # the processes that it starts, it also sets WORLD_SIZE and RANK.
    asked = "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment
    if processes == 1 and asked and "WORLD_SIZE" not in environment:
        raise RopeExtendError(
            "accelerate launch was asked for several processes, but started only this one. It does so on a "
            "CPU, and if there are fewer visible GPUs than processes. Use torchrun --nproc-per-node N (on a "
            "CPU with ACCELERATE_USE_CPU=true), or --num_processes 1"
        )


def _number(environment: Mapping[str, str], name: str, default: int = 1) -> int:
    """The whole number in a variable, or the default if it is not set or holds something else."""
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        return default
