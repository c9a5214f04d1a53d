"""Retrieval and decoding with the bundled model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from gpu.steps import Figure, Setting, Step, seconds_of
from rope_extend.attention.registry import without_cudnn
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.evaluation.prompts import PromptOptions
from rope_extend.evaluation.retrieval import answer_prompts, make_prompts
from rope_extend.evaluation.tasks import Passkey

SUBJECT = "Passkeys by the bundled model, compared with the CPU; and the time of a decoded token."


def passkeys(setting: Setting) -> Iterator[Figure]:
    """The score of passkeys under two methods, on the device and on the CPU."""
    tokenizer, tasks = AutoTokenizer.from_pretrained(MODEL_DIR), [Passkey(template="demo")]
    lengths = [128] if setting.dry else [256, 512, 1024]
    options = PromptOptions(depths=1 if setting.dry else 3, trials=1 if setting.dry else 5)
    prompts = make_prompts(tasks, tokenizer, lengths, options=options, progress=False)
    for name in ("yarn", "dynamic_ntk"):
        scores = []
        for device in ("cpu", setting.device):
            model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).to(device).eval()
            rx.extend(model, 2048, name)
            result = answer_prompts(model, tokenizer, tasks, prompts, progress=False)
            scores.append([score for cell in result.cells for score in cell.scores])
        equal = sum(ours == theirs for ours, theirs in zip(*scores, strict=True)) / len(prompts)
        yield Figure(f"{name}: mean score", statistics.mean(scores[1]))
        # A tie of two tokens may be resolved otherwise by another order of summation.
        yield Figure(f"{name}: share of prompts with the score of the CPU", equal, at_least=0.95)


@torch.no_grad()
def decoding(setting: Setting) -> Iterator[Figure]:
    """The median time of a token after a context, compared with a static method."""
    context, steps = (64, 2) if setting.dry else (1024, 64)
    ids = torch.randint(3, 200, (1, context + steps), generator=torch.Generator().manual_seed(0))
    ids = ids.to(setting.device)
    times = {}
    for name in ("yarn", "dynamic_ntk"):
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).to(setting.device).eval()
        rx.extend(model, 2048, name)
        cache = model(ids[:, :context], use_cache=True).past_key_values
        with without_cudnn():
            taken = [
                seconds_of(lambda at=at: model(ids[:, at, None], past_key_values=cache), setting.device)  # type: ignore[misc]  # noqa: B023
                for at in range(context, context + steps)
            ]
        times[name] = statistics.median(taken)
        yield Figure(f"{name}: a token after {context:,}", 1000 * times[name], "ms")
    ratio = times["dynamic_ntk"] / times["yarn"]
    yield Figure("dynamic_ntk: time of a token / yarn", ratio, at_most=setting.target(1.5))


STEPS = (Step("passkeys", passkeys, 120), Step("decoding", decoding, 20))
