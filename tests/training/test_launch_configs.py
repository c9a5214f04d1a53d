"""The configs for `accelerate launch` are read by accelerate itself, and have the effect that they name."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import ParallelismConfig
from commands import ON_A_CPU, Commands
from several_processes import launch
from test_distributed import AS_IF_GPUS
from torch.distributed.run import get_args_parser

from rope_extend.cli.main import parse
from rope_extend.training.recipe import recipe_from_arguments

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
    "ddp": "MULTI_GPU Sharding(weights=False, parts=1, loaded_once=False, ranks=2",
    "fsdp2": "FSDP Sharding(weights=True, parts=1, loaded_once=False, ranks=2",
    "context_parallel": "FSDP Sharding(weights=True, parts=2, loaded_once=False, ranks=2",
}


def test_there_is_a_config_for_each_way() -> None:
    assert [path.stem for path in CONFIGS] == sorted(COMES_TO)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_knows_every_key_and_every_line_is_explained(path: Path) -> None:
    config = load_config_from_file(str(path))  # refuses unknown keys
    sizes = {
        key.removeprefix("parallelism_config_"): value for key, value in config.parallelism_config.items()
    }
    handlers = {key for key in sizes if key.startswith(("cp_comm", "sp_seq", "sp_attn"))}
    parallelism = ParallelismConfig(**{key: sizes[key] for key in sizes.keys() - handlers})
    assert config.num_processes % parallelism.total_size == 0
    text = path.read_text()
    assert f"--config_file configs/accelerate/{path.name} -m rope_extend finetune" in text
    lines = text.splitlines()
    assert all("#" in line for line in lines if line.strip() and not line.endswith("_config:"))
    assert all(len(line) <= 120 for line in lines)


def test_the_page_on_training_gives_complete_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "training.md").read_text().split("## Several GPUs")[1]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) >= len(CONFIGS) + 2
    for path in CONFIGS:
        assert any(str(path.relative_to(ROOT)) in words for words in commands), path.name
    for words in commands:
        assert all(Path(word).exists() for word in words if word.endswith((".yaml", ".py"))), words
        recipe_from_arguments(parse(words[words.index("finetune") :]))
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
    config = yaml.safe_load(path.read_text())
    config["num_processes"] = 2
    if "parallelism_config" in config:
        config["parallelism_config"]["parallelism_config_cp_size"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "show.py").write_text(SHOW_VARIABLES)
    words = ["--config_file", str(tmp_path / "config.yaml"), "--main_process_port", "0", "show.py"]
    common = ON_A_CPU
    said = commands.run("-m", "accelerate.commands.launch", *words, where=tmp_path, environment=common)
    given = [json.loads(line) for line in re.findall(r"^variables (.*)$", said, re.MULTILINE)]
    assert sorted((one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in given) == [
        ("0", "0", "2"), ("1", "1", "2"),
    ]  # fmt: skip
    said = launch(AS_IF_GPUS + TELL, where=tmp_path, environment={**common, **given[0]})
    told = re.findall(r"<(\w+ Sharding\(.*?), rank=(\d)\)>", said)
    assert sorted(told) == [(COMES_TO[path.stem], "0"), (COMES_TO[path.stem], "1")]


@pytest.mark.slow
def test_without_gpus_a_launch_is_refused_with_the_reason(
    work: Path, tmp_path: Path, commands: Commands
) -> None:
    """A real launch on this machine: FSDP is configured, but there are no GPUs."""
    config = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
    words = (
        f"-m accelerate.commands.launch --num_processes 2 --main_process_port 0 --config_file {config} "
        f"-m rope_extend finetune --model {work / 'model'} --data {work / 'data'} "
        f"--output-dir {tmp_path / 'run'} --target-length 64"
    )
    commands.start(*shlex.split(words), environment=ON_A_CPU)
    assert commands.wait() != 0
    assert "torchrun started 2 processes, but this one found 1" in commands.printed()
    assert not (tmp_path / "run").exists()
