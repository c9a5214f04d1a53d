"""A launch whose processes do not find each other is refused before anything is written."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ON_A_CPU, Commands
from runs import assert_same, settings, weights

from rope_extend import RopeExtendError
from rope_extend.cli.main import main
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.launch import check_launch, check_variables

TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    "GROUP_WORLD_SIZE": "1",
}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "processes", "message"),
    [
        (TORCHRUN, 1, r"torchrun started 4 processes, but this one found 1.*ACCELERATE_USE_CPU"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, r"Open MPI.* started 2 processes .*only 1 found.*torchrun"),
        ({"PMI_SIZE": "3"}, 1, r"mpiexec .*PMI_SIZE=3"),
        ({"MV2_COMM_WORLD_SIZE": "3"}, 1, "MVAPICH2"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, 1, r"srun started 8 processes"),
        (SLURM, 1, r"8 tasks .*without srun or torchrun.*SLURM_NTASKS=1"),
        # one torchrun in each of two tasks, which do not know each other's machine
        (TORCHRUN | SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, 4, r"srun started 2 processes .*only 1 found"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, 1, "accelerate launch was asked"),
    ],
)
def test_a_launch_whose_processes_do_not_find_each_other_is_refused(
    environment: dict[str, str], processes: int, message: str
) -> None:
    with pytest.raises(RopeExtendError, match=message):
        check_launch(processes, environment)


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, 1),
        (TORCHRUN, 4),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        # as set by accelerate once it has connected the processes of mpirun on a CPU
        ({"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, 2),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, 8),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, 1),
        (SLURM | {"SLURM_NTASKS": "1"}, 1),
        (TORCHRUN | SLURM, 4),
        # one torchrun on each of two machines, eight processes in all
        (TORCHRUN | {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, 8),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, 1),
    ],
)
def test_launches_whose_processes_find_each_other_pass(environment: dict[str, str], processes: int) -> None:
    check_launch(processes, environment)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"LOCAL_RANK": "1"}, "WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "LOCAL_RANK not set"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, r"others: RANK not set"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR not set"),
    ],
)
def test_half_of_the_variables_are_refused(environment: dict[str, str], missing: str) -> None:
    with pytest.raises(RopeExtendError, match=missing):
        check_variables(environment)


@pytest.mark.parametrize("environment", [{}, {"RANK": "3"}, {"WORLD_SIZE": "1"}, TORCHRUN])
def test_none_or_all_of_the_variables_pass(environment: dict[str, str]) -> None:
    check_variables(environment)


LAUNCHES = {
    "torchrun on a CPU": (
        "-m torch.distributed.run --standalone --nproc-per-node 2",
        {},
        "torchrun started 2",
    ),
    "accelerate launch on a CPU": (
        "-m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1",
        {},
        "accelerate launch was asked for several processes",
    ),
    "mpirun": ("", {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "started 2 processes"),
    "half of torchrun": ("", {"LOCAL_RANK": "1"}, "WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT not set"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_real_launch_without_connections_writes_nothing(
    work: Path, tmp_path: Path, launch: str, commands: Commands
) -> None:
    """Real processes under real launchers; without a visible GPU, each would train by itself."""
    launcher, variables, message = LAUNCHES[launch]
    recipe = Recipe(**settings(work), output_dir=str(tmp_path / "run"))
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    words = ["finetune", str(tmp_path / "recipe.yaml")]
    if launcher:
        words = [*shlex.split(launcher), "-m", "rope_extend", *words]
    commands.start(*words, environment={**ON_A_CPU, **variables})
    assert commands.wait() != 0
    assert message in commands.printed()
    assert not (tmp_path / "run").exists()


def test_an_evaluation_whose_processes_do_not_find_each_other_is_refused(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    command = f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16 --output {tmp_path / 'out'}"
    with pytest.raises(SystemExit):
        main(shlex.split(command))
    assert "started 2 processes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_gradient_accumulation_of_the_recipe_overrides_that_of_the_launcher(
    work: Path, tmp_path: Path, private_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate prefers the variable of its launcher to its argument."""
    recipe = Recipe(**{**settings(work), "steps": 2}, output_dir=str(tmp_path / "one"))
    finetune(recipe)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    other = replace(recipe, output_dir=str(tmp_path / "two"))
    finetune(other)
    assert_same(weights(recipe.output_dir), weights(other.output_dir))
