"""Several processes give what one gives: sharing sequences, weights, or the parts of each sequence.

Real processes over gloo. What needs CUDA is accelerate's own choice of FSDP, which it makes for GPUs alone:
one line tells it that these are some, and all that follows is real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import tiny_llama
from test_finetune import assert_same, metrics, settings, tokenizer_of, weights

from rope_extend.finetune import Recipe, finetune

FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip

AS_IF_GPUS = """
import os
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
"""

TRAIN = """
import sys
from torch.distributed.tensor import DTensor
from rope_extend.finetune import Recipe, finetune
for path in sys.argv[1:]:
    result = finetune(Recipe.from_yaml(path.removesuffix("+")), resume=path.endswith("+"))
    parameters = list(result.model.parameters())
    print("sharded", sum(isinstance(one, DTensor) for one in parameters), "of", len(parameters))
"""


def launch(
    script: str, *arguments: str, where: Path, environment: dict[str, str] | None = None, processes: int = 2
) -> str:
    """Run a script in several processes; what they printed."""
    path = where / "script.py"
    path.write_text(script)
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
         str(path), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


def written(recipe: Recipe, where: Path) -> str:
    path = where / f"{Path(recipe.output_dir).name}.yaml"
    path.write_text(recipe.to_yaml())
    return str(path)


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    base = tiny_llama(tie_word_embeddings=True)  # so that trained embeddings are a trained head
    base.save_pretrained(tmp_path / "base")
    recipe = Recipe(
        **{**settings(work), "lora_dropout": 0.0, "steps": 4, "save_every": 2, "gradient_accumulation": 4},
        output_dir=str(tmp_path / "one"),
    )
    tokenizer_of(recipe).save_pretrained(tmp_path / "base")
    return replace(recipe, model=str(tmp_path / "base"), eval_data=str(work / "data" / "a.txt"), eval_every=2)


def assert_close(ours: Recipe, theirs: Recipe) -> None:
    """Equal but for the order of sums: weights, losses, norms of the gradient, and perplexities."""
    mine, others = weights(ours.output_dir), weights(theirs.output_dir)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, others[name], atol=1e-5, rtol=1e-4)
    for line, other in zip(metrics(ours.output_dir), metrics(theirs.output_dir), strict=True):
        assert line.keys() == other.keys()
        for key in line.keys() & {"step", "loss", "grad_norm", "perplexity", "tokens"}:
            assert line[key] == pytest.approx(other[key], rel=1e-4), key


WAYS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all": {"train_norm_embed": True, "gradient_checkpointing": True, "lora_targets": "all-linear"},
    "learned": {"method": "t5_bias", "eval_data": None, "eval_every": 0},
}


@pytest.mark.slow
def test_weights_that_are_spread_train_as_whole_ones(recipe: Recipe, tmp_path: Path) -> None:
    """FSDP2 in two processes: weights, metrics, record and a resumed run are those of one process."""
    import rope_extend as rx

    ones, twos = [], []
    for way, changes in WAYS.items():
        ones.append(replace(recipe, **changes, output_dir=str(tmp_path / way)))
        twos.append(replace(ones[-1], gradient_accumulation=2, output_dir=str(tmp_path / f"{way}-2")))
        finetune(ones[-1])
    half = replace(twos[1], steps=2, output_dir=str(tmp_path / "resumed"))
    again = replace(twos[1], output_dir=half.output_dir)
    written(half, tmp_path)
    (tmp_path / "again.yaml").write_text(again.to_yaml())
    said = launch(
        AS_IF_GPUS + TRAIN,
        *(written(one, tmp_path) for one in (*twos, half)), f"{tmp_path / 'again.yaml'}+",
        where=tmp_path, environment=FSDP,
    )  # fmt: skip
    lines = [line for line in said.splitlines() if line.startswith("sharded")]
    assert len(lines) == 2 * 5
    assert all(line.split()[1] == line.split()[3] for line in lines)
    for one, two in zip(ones, twos, strict=True):
        assert_close(two, one)
        ours, theirs = rx.load(one.output_dir), rx.load(two.output_dir)
        ids = torch.arange(128)[None]
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
        records = [rx.checkpoint.read_record(run.output_dir) for run in (one, two)]
        assert records[0].base_fingerprint == records[1].base_fingerprint is not None
    assert_same(weights(again.output_dir), weights(twos[1].output_dir))
