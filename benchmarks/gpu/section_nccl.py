"""Collective operations with one process: they start, and a step under DistributedDataParallel is exact."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import rope_extend as rx
from gpu.section_tests import FLOAT32_LIMIT, random_ids, small_model
from gpu.steps import Figure, Setting, Step, seconds_of
from rope_extend.loss import next_token_loss
from rope_extend.models.processes import PATIENCE

SUBJECT = "NCCL with one process, with the time-out of a run. A dry run uses gloo."


@contextmanager
def one_process(setting: Setting) -> Iterator[str]:
    """A group of this process alone; the name of its backend."""
    backend = "nccl" if setting.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as directory:
        store = (Path(directory) / "store").as_uri()
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1, timeout=PATIENCE)
        try:
            yield backend
        finally:
            dist.destroy_process_group()


def collectives(setting: Setting) -> Iterator[Figure]:
    """A sum over the group, and a gathered object."""
    with one_process(setting) as backend:
        values = torch.arange(1000.0, device=setting.device)
        seconds = seconds_of(lambda: dist.all_reduce(values), setting.device)
        yield Figure(f"{backend}: first sum", seconds, "s")
        gap = float((values.cpu() - torch.arange(1000.0)).abs().max())
        yield Figure(f"{backend}: difference of the sum", gap, at_most=0)
        gathered: list[object] = [None]
        dist.all_gather_object(gathered, {"losses": [1.5]})
        yield Figure(
            f"{backend}: gathered objects that differ", int(gathered != [{"losses": [1.5]}]), at_most=0
        )


def distributed_step(setting: Setting) -> Iterator[Figure]:
    """Gradients of a patched model under DistributedDataParallel, compared with those without it."""
    ids = random_ids(64, rows=2).to(setting.device)

    def gradients(wrapped: bool) -> list[Tensor]:
        model = small_model(setting.device).train()
        rx.patch_model(model, rx.encoding("yarn", factor=8.0))
        trained = DistributedDataParallel(model) if wrapped else model
        loss = trained(ids, labels=ids).loss if wrapped else next_token_loss(model, ids)
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    with one_process(setting) as backend:
        found, expected = gradients(True), gradients(False)
        worst = max(
            float((ours - theirs).abs().max() / theirs.abs().max())
            for ours, theirs in zip(found, expected, strict=True)
        )
        yield Figure(f"{backend}: difference of gradients, relative", worst, at_most=FLOAT32_LIMIT)


STEPS = (Step("collectives", collectives, 20), Step("distributed step", distributed_step, 20))
