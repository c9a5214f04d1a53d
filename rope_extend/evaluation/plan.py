"""What an evaluation will take, in memory and time, said before any weights are read.

Memory is not computed by a formula for each family: the evaluator itself runs on the meta device, where
tensors have shapes and no values, and the bytes are counted that it would hold. Time is the operations of
such a run, over rates that are measured on the device in a fraction of a second.
"""

from __future__ import annotations

import bisect
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from accelerate.utils import get_max_memory
from peft import PeftConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils import cached_file

from rope_extend.attention.functions import attention_modules
from rope_extend.data import format_length
from rope_extend.encodings import Encoding, RopeEncoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.lower_right import calls_by_name, causal_mask
from rope_extend.evaluation.memory import LiveBytes
from rope_extend.evaluation.perplexity import Reader, default_batch_tokens, default_chunk_bytes
from rope_extend.evaluation.reading import LongReader, Room
from rope_extend.hardware import Hardware, is_quantized
from rope_extend.inspection import layer_config, unwrap
from rope_extend.patching import patch_model
from rope_extend.undo import UndoLog

logger = logging.getLogger(__name__)

META = torch.device("meta")
MARGIN = 0.95
"""Share of the free memory that is planned with: the rest is for what kernels and allocators take."""
SMALLEST = 256
"""Fewest tokens at a time that a plan proposes."""
WHOLE = "in one piece"
STAND_IN = "rehearsed_"
"""What the name of an attention implementation that only takes memory begins with."""


@dataclass(frozen=True)
class Reading:
    """How a window is read, and what that takes.

    Attributes:
        length: in tokens.
        at_once: how many tokens are read at a time.
        way: "in one piece", "layer by layer" or "with a cache".
        memory: the most bytes held at one time, the weights included.
        fits: whether the memory is to be had.
    """

    length: int
    at_once: int
    way: str
    memory: int
    fits: bool

    @property
    def reading(self) -> str:
        """In words, how the window is read."""
        return self.way if self.at_once >= self.length else f"{self.way}, {self.at_once:,} at a time"


@dataclass(frozen=True)
class LengthPlan(Reading):
    """What one window takes, in time as well.

    Attributes:
        flops: of a document, those of attention counted for the pairs that are not masked out.
        seconds: of a document, about.
    """

    flops: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What an evaluation takes, by length.

    Attributes:
        lengths: ascending.
        weights: bytes of the weights.
        available: bytes to be had on the device, or of the limit.
        place: the device.
        most: the longest window that fits, in tokens; None where all do.
    """

    lengths: tuple[LengthPlan, ...]
    weights: int
    available: int
    place: torch.device
    most: int | None

    @property
    def longest(self) -> LengthPlan:
        """The plan of the longest window."""
        return self.lengths[-1]

    @property
    def beside_weights(self) -> int:
        """Bytes that the longest window takes beside the weights."""
        return self.longest.memory - self.weights

    def check(self) -> None:
        """Refuse a length that cannot fit.

        Raises:
            RopeExtendError: naming the nearest that does.
        """
        wrong = next((one for one in self.lengths if not one.fits), None)
        if wrong is None:
            return
        nearest = f"up to {self.most:,} tokens fit" if self.most else "no length fits beside the weights"
        raise RopeExtendError(
            f"{wrong.length:,} tokens need about {format_bytes(wrong.memory)}, {wrong.reading}, and "
            f"{format_bytes(self.available)} are to be had on {self.place} ({format_bytes(self.weights)} go "
            f"to weights); {nearest}. A smaller dtype, quantize or a device_map make room"
        )

    def __str__(self) -> str:
        lines = [
            f"plan: {format_bytes(self.weights)} of weights, {format_bytes(self.available)} to be had on "
            f"{self.place}",
            f"{'tokens':>10}  {'memory':>9}  {'a document':>10}  read",
        ]
        lines += [
            f"{format_length(one.length):>10}  {format_bytes(one.memory):>9}  {_duration(one.seconds):>10}  "
            f"{one.reading if one.fits else 'does not fit'}"
            for one in self.lengths
        ]
        return "\n".join(lines)


def plan(
    model: str,
    lengths: Sequence[int],
    *,
    hardware: Hardware,
    encodings: Sequence[Encoding | None] = (None,),
    adapters: Sequence[tuple[Path, Encoding]] = (),
    trained_length: int | None = None,
    chunk: int | None = None,
    batched: bool = False,
) -> Plan | None:
    """Foretell what reading windows of these lengths takes.

    Args:
        model: a checkpoint's directory or hub id, of which only the config is read.
        lengths: in tokens.
        hardware: where and how it will be loaded.
        encodings: what it will read with; the one that takes most counts. None is as it is.
        adapters: directories of adapters, and what it will read with under each; likewise.
        trained_length: the window the model was pretrained on, where the config does not say it.
        chunk: how many tokens to read at a time; by default as many as there is memory for.
        batched: whether short windows go through the model together.

    Returns:
        The plan; None, with a word in the log, for a family that does not run on the meta device.
    """
    empty = hardware.empty(model)
    weights = weight_bytes(model, empty, hardware)
    alike: dict[Any, Encoding | None] = {}  # of encodings that act alike, one
    for one in encodings:
        alike.setdefault(_acting(one), one)

    def rehearsed() -> Plan:
        rehearsal = ReadingRehearsal(
            empty,
            hardware.place,
            weights=weights,
            available=available_memory(hardware),
            spread=hardware.device_map is not None,
            together=default_batch_tokens(hardware.place) if batched else 1,
            ways=[
                nullcontext if one is None
                else partial(_patched, empty, one, trained_length)
                for one in alike.values()
            ] + [partial(_tuned, empty, *adapter, trained_length) for adapter in adapters],
        )  # fmt: skip
        return _planned(rehearsal, sorted(set(lengths)), chunk)

    return foretold(rehearsed, empty, "it")


def _acting(encoding: Encoding | None) -> Any:
    """What encodings have in common that take as much: inside attention, by row, or of their own kind."""
    if encoding is None:
        return False, False
    if isinstance(encoding, RopeEncoding):
        return encoding.rotates_in_attention, encoding.per_row
    return type(encoding)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is said of a patch: where it matters, the same is said of the model itself."""
    log = logging.getLogger("rope_extend.patching")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _patched(empty: Any, encoding: Encoding, trained_length: int | None) -> Iterator[None]:
    """A model without weights as it is with an encoding."""
    with quiet(), patch_model(empty, encoding, trained_length=trained_length):
        yield


@contextmanager
def _tuned(empty: Any, adapter: Path, encoding: Encoding, trained_length: int | None) -> Iterator[None]:
    """A model without weights as it is with an adapter, whose products have states of their own."""
    config = PeftConfig.from_pretrained(str(adapter))
    with _patched(empty, encoding, trained_length):
        tuned = get_peft_model(empty, config)
        try:
            yield
        finally:
            tuned.unload()


_Found = TypeVar("_Found")


def foretold(rehearsed: Callable[[], _Found], model: nn.Module, what: str) -> _Found | None:
    """What a rehearsal of `what` finds; None, with a word in the log, for a family that has none."""
    try:
        return rehearsed()
    except RopeExtendError:
        raise
    except Exception as error:  # whatever a family does with values, which the meta device does not have
        logger.info("%s: what %s takes cannot be foretold (%r)", unwrap(model).config.model_type, what, error)
        return None


def _planned(rehearsal: ReadingRehearsal, lengths: Sequence[int], chunk: int | None) -> Plan:
    operations = operations_of(rehearsal.model)
    rates = measured_rates(rehearsal.model, rehearsal.place)
    rows = []
    for tokens in lengths:
        linear, attention = operations.linear * tokens, operations.attention(tokens)
        seconds = linear / rates.linear + attention / rates.attention
        found = rehearsal.reading(tokens, chunk)
        rows.append(LengthPlan(**vars(found), flops=operations.of(tokens), seconds=seconds))
    most = None if rows[-1].fits else rehearsal.most(lengths[-1], chunk or SMALLEST)
    return Plan(tuple(rows), rehearsal.weights, rehearsal.available, rehearsal.place, most)


@dataclass(frozen=True)
class Operations:
    """What a model does for a window, in floating-point operations.

    Attributes:
        linear: for each token.
        layers: of attention in each layer: for each pair of a query and a key, and how many keys a query
            sees at most, None for all before it.
    """

    linear: float
    layers: tuple[tuple[float, int | None], ...]

    def of(self, tokens: int) -> float:
        """Of a window, in all."""
        return self.linear * tokens + self.attention(tokens)

    def attention(self, tokens: int) -> float:
        """Of all layers' attention in a window, for the pairs that are not masked out."""
        return sum(cost * _pairs(tokens, window) for cost, window in self.layers)


def _pairs(tokens: int, window: int | None) -> float:
    """How many pairs of a query and a key a causal window has."""
    reach = min(tokens, window or tokens)
    return tokens * reach - reach * (reach - 1) / 2


@dataclass(frozen=True)
class Rates:
    """Floating-point operations per second of a device: of matrix products, and of causal attention."""

    linear: float
    attention: float


class ReadingRehearsal:
    """Runs the evaluator on a model without weights, and counts.

    Args:
        model: without weights, with or without adapter layers in it.
        place: where it will read.
        weights: bytes that are held all the while, those of the model included.
        available: bytes to be had; beside the weights, where these go elsewhere.
        spread: whether they do.
        together: of how many tokens short windows go through the model together; 1 for each alone.
        ways: what the model is to be put into, one after the other; the one that takes most counts, with
            the weights that it adds.
    """

    def __init__(
        self,
        model: nn.Module,
        place: torch.device,
        *,
        weights: int,
        available: int,
        spread: bool = False,
        together: int = 1,
        ways: Sequence[Callable[[], AbstractContextManager[Any]]] = (nullcontext,),
    ) -> None:
        self.model, self.place, self.weights, self.available = model, place, weights, available
        self.spread, self.together, self.ways = spread, together, ways
        self.usual = LongReader(model, place)  # how much it reads at a time by itself
        self.own = self._counted().live

    def reading(self, tokens: int, chunk: int | None = None) -> Reading:
        """The usual way of reading a window, or if that does not fit, the largest pieces that do."""
        size = min(chunk or self.usual.size(tokens), tokens)
        memory, way = self.memory(tokens, size)
        while not self.fits(memory) and chunk is None and size > SMALLEST:
            half = max(SMALLEST, size // 2)
            smaller, other = self.memory(tokens, half)
            if other == WHOLE:  # it cannot be read in pieces
                break
            size, memory, way = half, smaller, other
        return Reading(tokens, tokens if way == WHOLE else size, way, memory, self.fits(memory))

    def fits(self, memory: int) -> bool:
        """Whether there is so much; where weights can go elsewhere, beside them."""
        return (memory - self.weights if self.spread else memory) <= MARGIN * self.available

    def most(self, tokens: int, size: int = SMALLEST) -> int:
        """The longest window that fits, to a 64th of one that does not."""
        step = max(SMALLEST, tokens // 64 // SMALLEST * SMALLEST)
        return step * bisect.bisect_left(
            range(1, tokens // step + 1), True, key=lambda n: not self.fits(self.memory(n * step, size)[0])
        )

    def memory(self, tokens: int, size: int) -> tuple[int, str]:
        """The most bytes at one time, and how the window is read: of the way that takes most."""
        return max(self._memory(tokens, size, way) for way in self.ways)

    def _memory(
        self, tokens: int, size: int, put_into: Callable[[], AbstractContextManager[Any]]
    ) -> tuple[int, str]:
        """In one of the ways. Short windows are read as many together as the evaluator does."""
        with attending(self.model, maskless=self.usual.maskless), OwnCalls(), put_into():
            reader = Reader(self.model, META, chunk=size, chunk_bytes=default_chunk_bytes(self.place))
            reader.asked, reader.long = False, _Shortened(self.model, META)
            counter = MetaBytes()
            with counter, torch.no_grad():
                way = reader.long.way if size < tokens and reader.in_pieces(tokens, size) else WHOLE
            ids = torch.zeros(max(1, self.together // tokens), tokens, dtype=torch.int64, device=META)
            counter = self._counted()
            with counter, torch.no_grad():
                # The first logits are computed while most else is still there; the others would hold as much.
                scored = min(tokens - 1, size, 2 * reader.chunk_bytes // (4 * reader.vocabulary) + 1)
                reader.losses(ids, ids[:, 1 : scored + 1], 1, scored + 1)
        losses = 8 * ids.numel()  # of all tokens, in pieces and joined
        return self.weights + counter.peak - self.own + losses, way or WHOLE

    def _counted(self) -> MetaBytes:
        """A counter that knows of the model."""
        counter = MetaBytes()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            counter.add(tensor)
        return counter


def operations_of(model: nn.Module) -> Operations:
    """What a model, on the meta device, does for a window; counted on three short ones.

    Attention that goes through transformers' attention functions is counted call by call. What else grows
    with the square of the window is of families that multiply queries and keys by themselves (Falcon, the
    indexers of DeepSeek), and shows in the second difference.
    """
    layers: list[tuple[float, int | None]] = []

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        cost = 2.0 * query.shape[1] * (query.shape[-1] + value.shape[-1])
        layers.append((cost, getattr(module, "sliding_window", None)))

    def products(tokens: int) -> int:
        layers.clear()
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
        reader = Reader(model, META, chunk=tokens)
        with MetaBytes(), FlopCounterMode(display=False) as counter:
            reader.losses(ids, ids[:, 1:], 1, tokens)
        return counter.get_total_flops()

    step = 256  # state-space layers fill their pieces up, which are of 256 tokens at most
    with attending(model, maskless=True, note=note), torch.no_grad():
        one, two, three = (products(turn * step) for turn in (1, 2, 3))
    square = (three - 2 * two + one) / (2 * step**2)
    if square > 0:
        layers.append((square, None))
    return Operations((two - one) / step - 3 * step * square, tuple(layers))


class _Shortened(LongReader):
    """Reads of many pieces the first and the last, and of many layers one of each kind.

    What is between takes as much memory, and is only noted as read.
    """

    def turns(self, layers: int) -> Sequence[int]:
        """The first layer of each kind, and the last, whose states are what is wanted."""
        caches = DynamicCache(config=self.config).layers
        kinds: dict[Any, int] = {}
        for number, layer in enumerate(self._layers()):
            kind = (type(layer), type(caches[number]), getattr(layer, "attention_type", None))
            kinds.setdefault(kind, number)
        return sorted({*kinds.values(), layers - 1})

    def in_pieces(self, inputs: Tensor, size: int) -> Iterator[Tensor]:
        """States of the first piece, of all between, and of the last."""
        tokens = inputs.shape[1]
        if tokens <= 3 * size:
            return super().in_pieces(inputs, size)
        pieces = torch.split(inputs, [size, tokens - 2 * size, size], dim=1)
        width = self.config.get_text_config(decoder=True).hidden_size
        self._between = inputs.new_empty((*pieces[1].shape, width), dtype=self.lm.dtype)
        return self.by_layer(pieces) if self.way == "layer by layer" else self.with_cache(pieces)

    def _decode(self, piece: Tensor, cache: DynamicCache) -> Tensor:
        states: Tensor | None = getattr(self, "_between", None)
        if states is None or piece.shape != states.shape[:2]:
            return super()._decode(piece, cache)
        for layer in {id(layer): layer for layer in cache.layers}.values():
            if getattr(layer, "is_initialized", False) and hasattr(layer, "keys"):
                _skip(layer, piece.shape[1])
        if hasattr(cache, "rope_extend_positions"):
            positions = cache.rope_extend_positions
            cache.rope_extend_positions = torch.arange(positions.shape[1] + piece.shape[1])[None]
        return states


def _skip(layer: Any, tokens: int) -> None:
    """Let a layer of a cache have read so many tokens more."""
    if isinstance(layer, Room):
        stop = layer.keys.shape[-2] + tokens
        layer.keys, layer.values = (room[..., :stop, :] for room in layer.rooms)
    elif isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length += tokens
        kept = min(layer.cumulative_length, layer.sliding_window - 1)
        layer.keys, layer.values = (
            states.new_empty(*states.shape[:-2], kept, states.shape[-1])
            for states in (layer.keys, layer.values)
        )


class MetaBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts on the meta device, and answers for the operations that it does not have.

    Attributes:
        scored: asked which tokens are scored, it says so many; those after them take no more memory. If not
            given, it has no answer.
    """

    def __init__(self, scored: int | None = None) -> None:
        super().__init__()
        self.scored = scored

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # asked whether all tokens are of one text
        if self.scored and function is torch.ops.aten.nonzero.default and args[0].is_meta:
            out = args[0].new_empty((min(args[0].numel(), self.scored), args[0].ndim), dtype=torch.int64)
            self.add(out)
            return out
        if function is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            out = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
            self.add(out)
            return out
        return super().__torch_dispatch__(function, types, args, kwargs)


class OwnCalls(TorchFunctionMode):
    """Lets families that call torch's attention kernel by themselves take what it takes, and no more.

    On the meta device torch takes the way that holds the scores of all pairs.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            return _Kernel.apply(*args[:3], None)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


@contextmanager
def attending(model: nn.Module, *, maskless: bool, note: Callable[..., None] | None = None) -> Iterator[None]:
    """Let a model on the meta device attend by a function that takes the memory which kernels take.

    Args:
        model: without weights. Eager attention, which is no kernel, is only replaced where it is to be noted.
        maskless: whether the kernel knows by itself which queries see which keys.
        note: is told of each call.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        if note is not None:
            note(module, query, key, value)
        groups = getattr(module, "num_key_value_groups", 1)
        if groups > 1 and not use_gqa_in_sdpa(attention_mask, key, value):
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if attention_mask is not None:
            attention_mask = attention_mask.to(query.dtype)
        out = _Kernel.apply(query, key, value, attention_mask)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2), None

    undo = UndoLog()
    decoder = unwrap(model).base_model
    for module in (decoder, *attention_modules(model)) if calls_by_name(decoder) else ():
        settings: Any = module.config
        own = settings._attn_implementation
        if own.startswith(STAND_IN) or (own == "eager" and note is None):
            continue
        mask = _MASKS.get(own, _no_mask)
        if own == "sdpa" and maskless:
            mask = causal_mask
        AttentionInterface.register(STAND_IN + own, attention)
        AttentionMaskInterface.register(STAND_IN + own, mask)
        undo.set(settings, "_attn_implementation_internal", STAND_IN + own)
    try:
        yield
    finally:
        undo.unwind()


class _Kernel(torch.autograd.Function):
    """Takes the memory of an attention kernel: for its backward pass it keeps inputs, mask, output, sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        # As kernels lay it out: heads beside each other for each token.
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, sums, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


_MASKS: dict[str, Callable[..., Tensor | None]] = {"sdpa": sdpa_mask, "eager": eager_mask}
"""What attention implementations that need a mask are given; flash and flex attention need none."""


def weight_bytes(name: str, model: nn.Module, hardware: Hardware) -> int:
    """Bytes of a checkpoint's weights as they will be loaded; `model` is it on the meta device."""
    config = unwrap(model).config
    if is_quantized(config):  # what the files hold is what is loaded
        file = cached_file(name, "config.json", local_files_only=True)
        assert file is not None
        return sum(weights.stat().st_size for weights in Path(file).parent.glob("*.safetensors"))
    total = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    return total if hardware.quantize is None else total - quantized_savings(model, hardware.quantize)


def quantized_savings(model: nn.Module, kind: str) -> int:
    """By how many bytes `4bit` or `8bit` makes weights smaller; `model` may be on the meta device."""
    head = unwrap(model).get_output_embeddings()
    share = 1.0 if kind == "8bit" else 0.5 + 4 / 64  # a float32 for each 64 values
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    saved = sum(weight.nbytes - int(share * weight.numel()) for weight in matrices)
    return saved - max(weight.nbytes for weight in matrices)  # one at a time is brought back to what it was


def available_memory(hardware: Hardware) -> int:
    """Bytes to be had on the device, or of the limit; over several GPUs, on the one that has least."""
    place = hardware.place
    if place.type == "cuda":
        gpus = range(torch.cuda.device_count()) if hardware.device_map is not None else [place]
        free = min(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    elif place.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        free = min(get_max_memory()["cpu"], _control_group())
    return free if hardware.limit_memory is None else min(free, hardware.limit_memory)


def _control_group(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a container has left, which the system's own numbers do not show."""
    for most, used, statistics, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
            "total_inactive_file",
        ),
    ):  # fmt: skip
        try:
            left = int((root / most).read_text()) - int((root / used).read_text())
            counts = dict(line.split() for line in (root / statistics).read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, left + int(counts.get(files, 0)))  # files that were read are dropped where it is short
    return sys.maxsize


def measured_rates(model: nn.Module, place: torch.device) -> Rates:
    """What a device does per second, with matrices and heads of a model's size, in its dtype."""
    config = layer_config(unwrap(model).config)
    dtype, width = unwrap(model).dtype, config.hidden_size
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or width // heads
    fast = place.type != "cpu"
    budget = 2e12 if fast else 5e8  # operations of one trial
    rows = min(16_384, max(64, int(budget / (8 * width**2))))
    states = torch.randn(rows, width, device=place, dtype=dtype)
    matrix = torch.randn(width, 4 * width, device=place, dtype=dtype)
    tokens = min(16_384, max(256, int(math.sqrt(budget / (2 * heads * head)))))
    query = torch.randn(1, heads, tokens, head, device=place, dtype=dtype)

    def seconds(run: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(4):  # the first one warms up
            started = time.perf_counter()
            run()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    with torch.no_grad():
        products = seconds(lambda: states @ matrix)
        attention = seconds(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    return Rates(8.0 * rows * width**2 / products, 4.0 * heads * head * _pairs(tokens, None) / attention)


def format_bytes(count: float) -> str:
    """In words, with a decimal."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
