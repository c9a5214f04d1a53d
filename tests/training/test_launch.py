"""Launches: processes that do not find each other are refused, and configs have the effect that they name."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from commands import ON_A_CPU, Commands
from runs import assert_same, weights
from several_processes import launch as launch_forked
from test_distributed import AS_IF_GPUS
from torch.distributed.run import get_args_parser

from rope_extend import RopeExtendError
from rope_extend.cli.main import main, parse
from rope_extend.cli.train import recipe_of
from rope_extend.models.launch import check_launch
from rope_extend.models.processes import PATIENCE
from rope_extend.training import finetune as tuning
from rope_extend.training.finetune import Recipe, finetune

TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    "GROUP_WORLD_SIZE": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "processes", "message"),
    [
        (TORCHRUN, 1, r"torchrun started 4 processes .*only 1 found.*ACCELERATE_USE_CPU"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, r"Open MPI.* started 2 processes .*only 1 found.*torchrun"),
        ({"PMI_SIZE": "3"}, 1, r"mpiexec .*PMI_SIZE=3"),
        ({"MV2_COMM_WORLD_SIZE": "3"}, 1, "MVAPICH2"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 1, r"srun started 8 processes"),
        # one torchrun in each of two tasks, which do not know each other's machine
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, 4, r"srun started 2 processes .*only 1 found"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, 1, "accelerate launch was asked"),
        ({}, 1, None),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, 1, None),
        (TORCHRUN, 4, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2, None),
        # as set by accelerate once it has connected the processes of mpirun on a CPU
        ({"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, 2, None),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 8, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 1, None),
        # one torchrun on each of two machines, eight processes in all
        (TORCHRUN | {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, 8, None),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 1, None),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, 1, None),
    ],
)
def test_a_launch_is_refused_only_if_its_processes_do_not_find_each_other(
    environment: dict[str, str], processes: int, message: str | None
) -> None:
    with pytest.raises(RopeExtendError, match=message) if message else nullcontext():
        check_launch(processes, environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("torch.distributed.run --standalone --nproc-per-node 2", "torchrun started 2"),
        (
            "accelerate.commands.launch --cpu --num_processes 2 --num_machines 1",
            "asked for several processes",
        ),
    ],
)
def test_a_real_launch_without_connections_writes_nothing(
    recipe: Recipe, tmp_path: Path, launcher: str, message: str, commands: Commands
) -> None:
    """Real processes under real launchers; without a visible GPU, each would train by itself."""
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    words = ["-m", *shlex.split(launcher), "-m", "rope_extend", "finetune", str(tmp_path / "recipe.yaml")]
    commands.start(*words, environment=ON_A_CPU)
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
    recipe: Recipe, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate prefers the variable of its launcher to its argument."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    assert_same(weights(finetune(recipe).output_dir), weights(finished))


def test_processes_wait_for_the_one_that_tokenises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would give up after ten minutes."""
    options: dict[str, Any] = {}

    def accelerator(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(num_processes=1)

    monkeypatch.setattr(tuning, "Accelerator", accelerator)
    tuning._accelerator(Recipe("model", "data", str(tmp_path), 64))
    assert [handler.timeout for handler in options["kwargs_handlers"]] == [PATIENCE]


ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))

TELL = """
from accelerate import Accelerator
from rope_extend.training.sharding import Sharding
accelerator = Accelerator(mixed_precision="no")
print(f"<{accelerator.distributed_type.name} {Sharding.of(accelerator)}>")
"""

VARIABLES = ("ACCELERATE_", "DS_", "FSDP_", "PARALLELISM_CONFIG_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""How the names of the variables begin by which accelerate's launcher tells a process what is configured."""

COMES_TO = {
    "ddp": "MULTI_GPU Sharding(weights=False, parts=1, loaded_once=False, ranks=2)",
    "fsdp2": "FSDP Sharding(weights=True, parts=1, loaded_once=False, ranks=2)",
    "context_parallel": "FSDP Sharding(weights=True, parts=2, loaded_once=False, ranks=2)",
}


def test_the_page_on_training_gives_complete_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "training.md").read_text().split("## Several GPUs")[1]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines() if "--plan" not in line]
    assert len(commands) >= len(CONFIGS) + 2
    for path in CONFIGS:
        assert any(str(path.relative_to(ROOT)) in words for words in commands), path.name
    for words in commands:
        assert all(Path(word).exists() for word in words if word.endswith((".yaml", ".py"))), words
        recipe_of(parse(words[words.index("finetune") :]))
        if "accelerate" in words:
            launched = launch_command_parser().parse_args(words[words.index("launch") + 1 :])
        else:
            launched = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert launched.module
        assert launched.training_script == "rope_extend"
        assert launched.training_script_args[0] == "finetune"


SHOW_VARIABLES = f"""
import json, os
given = {{name: value for name, value in os.environ.items() if name.startswith({VARIABLES})}}
print("variables", json.dumps(given))
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_real_launch_has_the_sharding_of_the_config(tmp_path: Path, path: Path, commands: Commands) -> None:
    """`accelerate launch` with the file, except its sizes, for two processes over gloo.

    It starts a script that shows the variables it got; two forked processes with the same ones do the rest.
    """
    lines = filter(str.strip, path.read_text().splitlines())
    assert all("#" in line for line in lines if not line.endswith("_config:"))
    config = yaml.safe_load(path.read_text())
    config["num_processes"] = 2
    if "parallelism_config" in config:
        config["parallelism_config"]["parallelism_config_cp_size"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "show.py").write_text(SHOW_VARIABLES)
    words = ["--config_file", str(tmp_path / "config.yaml"), "--main_process_port", "0", "show.py"]
    said = commands.run("-m", "accelerate.commands.launch", *words, where=tmp_path, environment=ON_A_CPU)
    given = [json.loads(line) for line in re.findall(r"^variables (.*)$", said, re.MULTILINE)]
    assert sorted((one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in given) == [
        ("0", "0", "2"), ("1", "1", "2"),
    ]  # fmt: skip
    said = launch_forked(AS_IF_GPUS + TELL, where=tmp_path, environment=ON_A_CPU | given[0])
    assert re.findall(r"<(\w+ Sharding\(.*?\))>", said) == [COMES_TO[path.stem]] * 2
