"""Position interpolation by training step, compared with training without it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import Row, row

import rope_extend as rx


def interpolation_curve(repetitions: int, steps: int | None = None, **changes: Any) -> Iterator[Row]:
    """Position interpolation at 4x the window by training step, and training without it (2306.15595).

    Runs configs/demo_1k_linear.yaml twice; `changes` replace fields of it.
    """
    config = Path(__file__).parent.parent / "configs" / "demo_1k_linear.yaml"
    changes |= {"steps": steps} if steps else {}
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        for method in ("linear", "none"):
            output = f"{directory}/{method}"
            recipe = rx.Recipe.from_yaml(config, {**changes, "method": method, "output_dir": output})
            rx.finetune(recipe)
            lines = map(json.loads, Path(output, "metrics.jsonl").read_text().splitlines())
            curves[method] = {line["step"]: line["perplexity"] for line in lines if "perplexity" in line}
    inside, beyond = map(str, recipe.eval_lengths or ())
    base = curves["none"][0][inside]
    ours, direct = ({step: at[beyond] for step, at in curve.items()} for curve in curves.values())
    last = max(ours)
    name, peer = f"interpolation: perplexity at {beyond}", f"the base model's at its {inside}"
    yield row(f"{name} after {last} steps", peer, "ppl", ours[last], base, 1.0)
    below = min((step for step, value in ours.items() if value < base), default=math.inf)
    yield row("interpolation: steps until then", "the target", "steps", below, 200, 1.0)
    peer = "the same training without it"
    for step in sorted(ours):
        target = 1.0 if step == last else None
        yield row(f"{name} after {step} steps", peer, "ppl", ours[step], direct[step], target)
