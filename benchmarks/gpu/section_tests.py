"""Exactness on the device: rotary tables, encodings with a cache, kernels without masks, offloading."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from gpu.steps import Figure, Setting, Step, synchronize
from rope_extend.attention.causal_suffix import causal_suffix_attention
from rope_extend.encodings.core.transfers import to_device
from rope_extend.evaluation.chunked_forward import ChunkedForward
from rope_extend.loss import hidden_states, next_token_loss
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options

SUBJECT = (
    "Exactness on the device, compared with the CPU or with float64; and how often the host waits for it."
)

WINDOW, FACTOR = 32, 8.0
YARN: dict[str, Any] = {"name": "yarn", "factor": FACTOR}
ENCODINGS: list[dict[str, Any]] = [
    YARN,
    {"name": "dynamic_ntk", "factor": FACTOR},
    {"name": "short_original", "inner": YARN},
    {"name": "logn", "inner": YARN},
    {"name": "xpos", "inner": {"name": "linear", "factor": FACTOR}},
    {"name": "drope", "factor": FACTOR},
    {"name": "alibi"},
    {"name": "t5_bias"},
    {"name": "fire"},
    {"name": "shaw"},
    {"name": "linear_attention"},
    {"name": "sinusoidal"},
]
FEW_READS = {"yarn": 0, "dynamic_ntk": 1, "short_original": 1, "alibi": 1, "t5_bias": 1, "fire": 1}
"""Encodings, and how often a forward may wait for the device more often than an unpatched model's."""

FLOAT32_LIMIT = 16 * 4 * torch.finfo(torch.float32).eps * 400**0.5
"""Of two float32 logits, added up in other orders: 400 roundings, which the model magnifies 16 times."""


def small_model(device: str, layers: int = 2, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A tiny Llama, with the same weights on every device."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=WINDOW,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device, dtype)


def random_ids(tokens: int, rows: int = 1) -> Tensor:
    """Random tokens, the same at every call."""
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def rotary_tables(setting: Setting) -> Iterator[Figure]:
    """cos and sin in bfloat16, compared with float64, up to two million tokens."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, setting.positions, (4096,), generator=generator).sort().values
    positions[-1] = setting.positions - 1
    for name in ("linear", "yarn", "ntk"):
        model = small_model(setting.device, dtype=torch.bfloat16)
        patch = rx.patch_model(model, rx.encoding(name, factor=FACTOR))
        table = patch.encoding.inv_freq(patch.shape).double()
        factor = patch.encoding.attention_factor(patch.shape)
        module = model.model.rotary_emb
        like = torch.zeros(1, dtype=torch.bfloat16, device=setting.device)
        cos, _ = module(like, positions[None].to(setting.device))
        exact = (positions[:, None].double() * table).cos() * factor
        gap = (cos[0, :, : len(table)].double().cpu() - exact).abs().max()
        half_unit = 2**-9 * 2 ** math.ceil(math.log2(factor))  # of the largest value in bfloat16
        yield Figure(f"{name}: difference of cos from float64", float(gap), at_most=1.01 * half_unit)


@torch.no_grad()
def cached_logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Logits of a text in two parts and of one more token, with a cache; on the CPU."""
    cache = DynamicCache(config=model.config)
    parts = ids.to(model.device).tensor_split([ids.shape[1] // 2, -1], dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1).cpu()


def encodings_with_a_cache(setting: Setting) -> Iterator[Figure]:
    """Every kind of encoding with a cache on the device, compared with one forward on the CPU."""
    ids = random_ids(80)
    for fields in ENCODINGS:
        expected, found = (small_model(device) for device in ("cpu", setting.device))
        for model in (expected, found):
            rx.patch_model(model, rx.Encoding.from_dict(fields), target_length=int(WINDOW * FACTOR))
        with torch.no_grad():
            whole = expected(ids, use_cache=False).logits
        gap = (cached_logits(found, ids) - whole).abs().max() / whole.abs().max()
        yield Figure(f"{fields['name']}: difference of logits, relative", float(gap), at_most=FLOAT32_LIMIT)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations whose result the host has to wait for."""

    NAMES = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in self.NAMES
        return function(*args, **(kwargs or {}))


def waits(run: Callable[[], object], device: str) -> int:
    """How often the host waits for the device; without a GPU, how often it would."""
    if device != "cuda":
        with _Reads() as reads:
            run()
        return reads.count
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def host_waits(setting: Setting) -> Iterator[Figure]:
    """How often a forward, and a step of decoding, waits for the device more than an unpatched model's."""

    @torch.no_grad()
    def counts(model: LlamaForCausalLM) -> list[int]:
        ids = random_ids(80).to(setting.device)
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)  # warm
        return [
            waits(lambda: model(ids, use_cache=False), setting.device),
            waits(lambda: model(ids[:, :1], past_key_values=cache), setting.device),
        ]

    stock = counts(small_model(setting.device, 6))
    for fields in ENCODINGS:
        if fields["name"] in FEW_READS:
            model = small_model(setting.device, 6)
            rx.patch_model(model, rx.Encoding.from_dict(fields), target_length=int(WINDOW * FACTOR))
            forward, decoding = (now - before for now, before in zip(counts(model), stock, strict=True))
            # A dry run also counts tensors that are on the host in any case.
            most = setting.target(FEW_READS[fields["name"]])
            yield Figure(f"{fields['name']}: waits of a forward", forward, at_most=most)
            yield Figure(f"{fields['name']}: waits of a decoding step", decoding, at_most=most)


def copies(setting: Setting) -> Iterator[Figure]:
    """Copies to the device whose source changes at once, while the device computes something long."""
    size, rounds = (64, 1) if setting.dry else (8192, 20)
    large = torch.ones(size, size, device=setting.device)
    for count in (64, 2**12, 2**20):
        for dtype in (torch.float64, torch.float32):  # the second one goes through a temporary tensor
            values = torch.arange(count, dtype=torch.float64)
            note = "the source stays as it is in a dry run"
            synchronize(setting.device)
            for _ in range(rounds):
                large @ large
            copy = to_device(values, torch.device(setting.device), dtype)
            if setting.device == "cuda":
                done = torch.cuda.current_stream().query()
                note = "the copy waited for the device" if done else "the device was still computing"
                values.fill_(-1).to(dtype)  # may take the memory of the temporary tensor
            wrong = int((copy.cpu() != torch.arange(count, dtype=dtype)).sum())
            kind = str(dtype).removeprefix("torch.")
            yield Figure(f"{count:,} values in {kind}: wrong ones", wrong, at_most=0, note=note)


@torch.no_grad()
def chunks_without_a_mask(setting: Setting) -> Iterator[Figure]:
    """A text in chunks by the flash kernel, without a mask, compared with one forward."""
    model = small_model(setting.device, dtype=torch.bfloat16)
    ids = random_ids(1000).to(setting.device)
    chunked = ChunkedForward(model, torch.device(setting.device))
    chunked.maskless = True
    with causal_suffix_attention(model.model), LiveBytes() as memory:
        found = torch.cat(list(chunked.in_chunks(ids, 300)), dim=1)
    expected = hidden_states(model, ids)
    gaps = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    # Two layers, each with about six roundings to bfloat16 of half a unit in the last place.
    yield Figure("difference of hidden states, relative", float(gaps.max()), at_most=12 * 2**-8)
    most = setting.target(300 * 1000 - 1)  # those of a mask; the kernel of a CPU needs one
    yield Figure("elements of the largest tensor", memory.largest, at_most=most)


def offloaded_gradients(setting: Setting) -> Iterator[Figure]:
    """Gradients with checkpoints in host memory, compared with checkpoints on the device."""
    model = small_model(setting.device, layers=6).train()
    ids = random_ids(min(512, setting.block), rows=2).to(setting.device)

    def gradients(options: MemoryOptions) -> list[Tensor]:
        with apply_memory_options(model, options):
            next_token_loss(model, ids).backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    for tiles in (0, 128):
        expected = gradients(MemoryOptions(True, tiles))
        worst = 0.0
        for _ in range(3):
            for ours, theirs in zip(gradients(MemoryOptions(True, tiles, True)), expected, strict=True):
                worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
        yield Figure(f"MLPs in tiles of {tiles}: difference, relative", worst, at_most=FLOAT32_LIMIT)


def marked_tests(setting: Setting) -> Iterator[Figure]:
    """The tests of the suite that are marked `gpu`, if pytest is installed."""
    root = Path(__file__).resolve().parents[2]
    files = [
        file
        for file in sorted((root / "tests").rglob("test_*.py"))
        if re.search(r"^@pytest\.mark\.gpu", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    missing = [
        name
        for name in ("pytest", "hypothesis", "matplotlib", "PIL")
        if importlib.util.find_spec(name) is None
    ]
    if setting.dry or missing:
        reason = f"{', '.join(missing)} not installed" if missing else "a dry run"
        yield Figure("tests that fail", None, note=f"{len(files)} files left out: {reason}")
        return
    command = [
        sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist",
        *map(str, files),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)
    }
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    yield Figure("tests that pass", counts.get("passed", 0), at_least=1)
    yield Figure("exit status of pytest", done.returncode, at_most=0)


STEPS = (
    Step("rotary tables", rotary_tables, 10),
    Step("encodings with a cache", encodings_with_a_cache, 30),
    Step("host waits", host_waits, 15),
    Step("copies", copies, 15),
    Step("chunks without a mask", chunks_without_a_mask, 10),
    Step("offloaded gradients", offloaded_gradients, 15),
    Step("marked tests", marked_tests, 90),
)
