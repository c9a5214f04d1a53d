"""Print the perplexity of an exported model in llama.cpp, next to that of the patched model.

    pip install --no-deps --target build/xllamacpp xllamacpp
    PYTHONPATH=build/xllamacpp:tests python tools/record_llama_cpp_perplexity.py \\
        MODEL BOOKS build/export --method yarn --target-length 16k --gguf MODEL.gguf

docs/llama_cpp.md has what it printed. xllamacpp is a build of llama.cpp with its server. Without `--gguf`,
the weights of the checkpoint are written in float32 as llama.cpp's converter writes them, so that both
compute with the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import torch
from gguf_writer import converted
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.data.documents import load_documents
from rope_extend.units import parse_length


def losses_here(model: Any, ids: list[int], count: int) -> list[float]:
    """The losses of the last `count` tokens in nats, float32."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids[:-1]]), use_cache=False)[0][0, -count:]
        logits = model.lm_head(hidden).float()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-count:]), reduction="none").tolist()


def losses_there(file: Path, ids: list[int], count: int) -> list[float]:
    """The losses of the last `count` tokens in llama.cpp, computed in float32.

    Its flash attention on a CPU rounds to float16: losses then differ by 5e-3 over 256 tokens, else by 2e-4.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.warmup = len(ids) + 64, False
    params.cpuparams.n_threads = torch.get_num_threads()
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)

    def loss(position: int) -> float:
        question = {
            "prompt": ids[:position], "n_predict": 1, "n_probs": 1_000_000, "cache_prompt": True,
            "temperature": -1.0,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        (answer,) = json.loads(urllib.request.urlopen(request).read())["completion_probabilities"]
        found = {each["id"]: each["logprob"] for each in answer["top_logprobs"]}
        return -float(found[ids[position]])

    return [loss(position) for position in range(len(ids) - count, len(ids))]


def compare(model: Any, file: Path, ids: list[int], count: int, label: str) -> None:
    """Print a row: both perplexities, and the largest difference of a token's loss."""
    here, there = losses_here(model, ids, count), losses_there(file, ids, count)
    ours, theirs = (math.exp(sum(losses) / count) for losses in (here, there))
    gap = max(abs(a - b) for a, b in zip(here, there, strict=True))
    print(f"| {label} | {len(ids):,} | {ours:.4f} | {theirs:.4f} | {gap:.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of a Llama checkpoint in float32")
    parser.add_argument("data", help="long documents")
    parser.add_argument("output", type=Path, help="directory for the checkpoint and the GGUF files")
    parser.add_argument("--method", default="yarn")
    parser.add_argument("--target-length", default="16k")
    parser.add_argument("--tokens", default="3k", help="tokens of the text, of which the last are scored")
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--gguf", type=Path, help="GGUF file with the weights, such as a quantised one")
    arguments = parser.parse_args()
    length, target = parse_length(arguments.tokens), parse_length(arguments.target_length)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    (document,) = load_documents(
        arguments.data, tokenizer, min_tokens=length, max_documents=1, max_tokens=length
    )
    ids = document.input_ids.tolist()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    arguments.output.mkdir(parents=True, exist_ok=True)
    source = arguments.gguf or arguments.output / "plain.gguf"
    if not source.exists():
        base = float(model.config.rope_parameters["rope_theta"])
        converted(model, source, **{"rope.freq_base": base})
    compare(model, source, ids, arguments.scored, f"none, {source.name}")
    patch = rx.extend(model, target, arguments.method)
    extended = arguments.output / arguments.method
    rx.save(model, extended)
    rx.export(extended, arguments.output / "gguf", "llama.cpp", gguf=source)
    exported = arguments.output / "gguf" / source.name
    compare(model, exported, ids, arguments.scored, f"{patch.encoding}, exported")
    compare(model, source, ids, arguments.scored, f"{patch.encoding}, {source.name} as it was")


if __name__ == "__main__":
    main()
