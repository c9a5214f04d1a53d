"""Perplexity at every length, from one forward per document, or by any other protocol with a name.

A causal model's loss at position p does not depend on what comes after p. So one forward over the longest
length gives, by truncating its losses, the perplexity at every shorter one, exactly.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import logging
import os
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import align_module_device, gather_object
from tqdm import tqdm

from rope_extend.data import Document, fingerprint, format_length, parse_length
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.protocols import Protocol, Window
from rope_extend.evaluation.protocols import protocol as protocol_of
from rope_extend.evaluation.reading import LongReader
from rope_extend.evaluation.results import Losses, PerplexityResult, write_arrays
from rope_extend.hardware import input_device, is_spread
from rope_extend.inspection import length_groups
from rope_extend.loss import CHUNK_BYTES, causal_lm, output_head, token_losses
from rope_extend.patching import current_patch
from rope_extend.processes import processes

logger = logging.getLogger(__name__)

HALVINGS = 6
"""How often the pieces are halved, where memory runs out, before giving up."""


def perplexity(
    model: torch.nn.Module,
    documents: Sequence[Document],
    lengths: Sequence[int | str],
    *,
    protocol: str = "prefix",
    window: int | str | None = None,
    stride: int | str | None = None,
    last: int | str | None = None,
    device: torch.device | str | None = None,
    chunk_bytes: int | None = None,
    chunk: int | str | None = None,
    suggested_chunk: int | None = None,
    batch_tokens: int | None = None,
    save_losses: bool = False,
    finished: str | Path | None = None,
    share: bool = False,
    progress: bool = True,
) -> PerplexityResult:
    """Measure perplexity at each of ``lengths``, with sums in float64.

    Every length is measured on the same documents: those that have ``max(lengths)`` tokens. A shorter
    document would be counted at one length and not at another, and the curve would compare texts.

    Protocols, N being each of the lengths; docs/protocols.md says more:
        ``prefix``: a document's first N tokens, in one forward; equals truncating to N. An encoding whose
        tables depend on the length gets one forward for each group of lengths with equal tables.

        ``cropped``: the same targets, but the model sees ``window`` tokens at a time, in windows that start
        ``window // 2`` apart. Each target is scored once, in the first window that has it, so after the
        first window it has between ``window // 2`` and ``window − 1`` tokens of context. It is the control
        row "as long a text, but no longer a context".

        ``sliding``: whole documents in windows of N, ``stride`` apart; each scores what is new in it.

        ``sliding-window-mean``: the same windows; the mean of their means. ``all-overlapping``: all of each
        window, over all documents joined. ``last-k``: the ``last`` targets of each document. ``disjoint``:
        windows that follow each other; ``disjoint-second-half``: the second half of each.

    Args:
        model: a causal language model, patched or not, with or without PEFT; left as it was found.
        documents: what to read.
        lengths: numbers of tokens, at least 2 each; ``"32k"`` works too.
        protocol: see above.
        window: for ``cropped``, and only there: tokens seen at a time.
        stride: tokens between the starts of windows, for the protocols that have it.
        last: for ``last-k``: how many targets.
        device: where to run; the model is brought back afterwards. Where it is, if not given.
        chunk_bytes: how many bytes of float32 logits are computed at a time; by default 256 MiB, and 64 MiB
            on a CPU.
        chunk: read each window in pieces of so many tokens, so that activations do not grow with it; only
            hidden states and the keys and values of one layer do, or where a family's layers cannot be read
            one by one, those of all. By itself only above 131,072 tokens, where attention would need a mask
            of the whole window, or where memory runs out.
        suggested_chunk: the same, for models and encodings that can be read so; others are read whole.
        batch_tokens: how many tokens of short windows go through the model together; by default 32,768, and
            4,096 on a CPU.
        save_losses: keep the loss of every token in ``result.losses``.
        finished: a directory in which each document's losses are kept as soon as it is done. A second call
            with the same arguments goes on from there, with the same result bit for bit.
        share: under `torchrun` or `accelerate launch`, let each process read its share of the documents. All
            get the same result, which is that of one process, and all have to call this.
        progress: show a progress bar, if there is a terminal.

    Raises:
        RopeExtendError: if an argument makes no sense, no document is long enough, ``finished`` holds
            another measurement, memory does not suffice for the smallest pieces, or ``chunk`` is given for an
            encoding that a cache cannot follow.
    """
    wanted = sorted({parse_length(length) for length in lengths})
    if not wanted or wanted[0] < 2:
        raise RopeExtendError(f"lengths must be one or more numbers of tokens, 2 or above; got {lengths!r}")
    rule = protocol_of(protocol)
    settings = rule.checked(wanted, {"window": window, "stride": stride, "last": last})
    pieces = None if chunk is None else parse_length(chunk)
    used = _texts(rule, documents, wanted[-1])
    lm = causal_lm(model)
    _check_vocabulary(used, lm)
    begin = getattr(lm.config, "bos_token_id", None) if rule.bos else None
    if not rule.nested:
        groups = [[length] for length in wanted]
    else:  # In windows every forward has the same length, and so every target the same position tables.
        groups = [wanted] if rule.settings else length_groups(model, wanted)
    plans = [[rule.plan(len(text), group[-1], settings) for group in groups] for text in used]
    if not all(itertools.chain(*plans)):
        raise RopeExtendError(
            f"protocol {protocol!r} finds no window of {wanted[-1]:,} tokens in {len(used[0]):,}; give more "
            "text or shorter lengths"
        )

    tally = [_Tally(rule, group) for group in groups]
    kept: dict[int, list[Losses]] = {group[-1]: [] for group in groups}
    forward_tokens = sum(w.stop - w.start for windows in itertools.chain(*plans) for w in windows)
    quiet = None if progress else True  # None: quiet unless on a terminal
    bar = tqdm(total=forward_tokens, unit="tok", unit_scale=True, desc="perplexity", disable=quiet)
    data = fingerprint(used)
    # Not inference_mode: what a model caches while in it could not take part in training afterwards.
    with _evaluating(model, lm, device) as place, torch.no_grad(), bar:
        reader = Reader(model, place, bar, chunk_bytes=chunk_bytes, chunk=pieces, batch_tokens=batch_tokens)
        reader.chunk = pieces or suggested_chunk
        group_of = processes(place) if share else None
        count, rank = (group_of.num_processes, group_of.process_index) if group_of else (1, 0)
        bar.reset(total=sum(_read(by_group) for by_group in plans[rank::count]))
        store = None
        if finished is not None:
            key = {"data": data, "protocol": protocol, **settings, "lengths": wanted, **_identity(model)}
            store = _Finished(Path(finished), key)

        def measured() -> Iterator[tuple[int, list[Losses], float]]:
            for number in range(rank, len(used), count):
                text, by_group = used[number], plans[number]
                done = store.read(number, by_group) if store else None
                if done is None:
                    started = time.perf_counter()
                    ids = text.input_ids
                    lead = begin if begin is not None and int(ids[0]) == begin else None
                    losses = reader.document(text.name, ids, by_group, lead)
                    done = losses, time.perf_counter() - started
                    if store:
                        store.write(number, *done)
                else:
                    bar.update(_read(by_group))
                yield number, *done

        seconds = [0.0] * count
        for number, losses, taken in _gathered(measured()) if group_of else measured():
            seconds[number % count] += taken
            for group, sums, windows, values in zip(groups, tally, plans[number], losses, strict=True):
                sums.add(windows, values)
                if save_losses:
                    kept[group[-1]].append(values)
        peak = peak_memory_bytes(place)
        if group_of:
            peak = max(gather_object([peak]))

    longest = tally[-1] if not rule.nested else max(tally, key=lambda one: one.lengths[-1])
    scored = longest.scored
    nll_by_position = np.divide(longest.sums, scored, out=np.full(len(scored), np.nan), where=scored > 0)
    bad = np.flatnonzero(~np.isfinite(nll_by_position) & (scored > 0))
    if bad.size:
        logger.warning("the loss is not a finite number from position %d on", bad[0] + 1)
    by_length = {length: one for one in tally for length in one.lengths}
    return PerplexityResult(
        ppl={length: by_length[length].ppl(length) for length in wanted},
        tokens={length: by_length[length].tokens[length] for length in wanted},
        nll_by_position=nll_by_position,
        protocol=protocol,
        window=settings.get("window"),
        documents=len(documents) if rule.joined else len(used),
        dropped_documents=0 if rule.joined else len(documents) - len(used),
        data=data,
        passes=len(groups),
        forward_tokens=forward_tokens,
        seconds=max(seconds),
        peak_memory_bytes=peak,
        stride=settings.get("stride"),
        last=settings.get("last"),
        scored_by_position=None if rule.nested else scored,
        document_nll={length: by_length[length].nll[length] for length in wanted},
        document_terms={length: by_length[length].terms[length] for length in wanted},
        losses=kept if save_losses else None,
    )


def _read(by_group: Sequence[Sequence[Window]]) -> int:
    """How many tokens of a document go through the model."""
    return sum(window.stop - window.start for windows in by_group for window in windows)


def _gathered(
    own: Iterator[tuple[int, list[Losses], float]],
) -> list[tuple[int, list[Losses], float]]:
    """What all processes measured, in the order of the documents."""
    every: list[tuple[int, list[Losses], float]] = gather_object(list(own))
    return sorted(every, key=lambda one: one[0])


class _Tally:
    """Sums over documents, in float64, for the lengths that one pass gives."""

    def __init__(self, rule: Protocol, lengths: Sequence[int]) -> None:
        self.rule, self.lengths = rule, lengths
        self.sums, self.scored = np.zeros(0), np.zeros(0, dtype=np.int64)  # by position
        self.tokens = dict.fromkeys(lengths, 0)
        self.nll: dict[int, list[float]] = {length: [] for length in lengths}
        self.terms: dict[int, list[int]] = {length: [] for length in lengths}

    def add(self, windows: Sequence[Window], losses: Losses) -> None:
        """Add a document's losses, float32 ``[targets of all windows]``."""
        values = losses.astype(np.float64)
        starts = [0 if self.rule.nested else window.start for window in windows]
        places = np.concatenate(
            [np.arange(w.first - start, w.end - start) for w, start in zip(windows, starts, strict=True)]
        )
        sums = np.bincount(places - 1, values)
        scored = np.bincount(places - 1)
        more = max(0, len(sums) - len(self.sums))
        self.sums, self.scored = np.pad(self.sums, (0, more)), np.pad(self.scored, (0, more))
        self.sums[: len(sums)] += sums
        self.scored[: len(scored)] += scored
        for length in self.lengths:
            mine = values[places < length] if self.rule.nested else values
            self.tokens[length] += len(mine)
            if self.rule.average == "window":
                ends = np.cumsum([w.end - w.first for w in windows])[:-1]
                mine = np.array([part.mean() for part in np.split(mine, ends)])
            self.nll[length].append(float(mine.sum()))
            self.terms[length].append(len(mine))

    def ppl(self, length: int) -> float:
        return statistics.ppl(sum(self.nll[length]) / sum(self.terms[length]))


def default_chunk_bytes(place: torch.device) -> int:
    """How many bytes of float32 logits are computed at a time."""
    return CHUNK_BYTES if place.type == "cpu" else 2**28


def default_batch_tokens(place: torch.device) -> int:
    """How many tokens of short windows go through a model together."""
    return 4096 if place.type == "cpu" else 32_768


class Reader:
    """Runs a model over windows, in pieces that fit into memory."""

    def __init__(
        self,
        model: torch.nn.Module,
        place: torch.device,
        bar: Any = None,
        *,
        chunk_bytes: int | None = None,
        chunk: int | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        self.model, self.place, self.bar = model, place, bar
        last = causal_lm(model).get_output_embeddings()
        self.vocabulary: int = getattr(last, "out_features", last.weight.shape[0])
        self.long = LongReader(model, place)
        self.chunk_bytes = chunk_bytes or default_chunk_bytes(place)
        self.chunk, self.asked = chunk, chunk is not None
        self.batch_tokens = batch_tokens or default_batch_tokens(place)
        self.halvings = 0
        self._possible: dict[tuple[int, int], bool] = {}

    def document(
        self, name: str, ids: torch.Tensor, plans: Sequence[Sequence[Window]], begin: int | None
    ) -> list[Losses]:
        """Losses of each plan's targets; where memory runs out, with pieces half as large, from the start."""
        while True:
            shown = self.bar.n
            try:
                return [self._windows(ids, windows, begin) for windows in plans]
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error):
                    raise
                what = str(error).splitlines()[0]
            # Outside the handler: until here the traceback holds on to the tensors.
            self._halve(name, what, [w.stop - w.start for windows in plans for w in windows])
            self.bar.n = shown
            self.bar.refresh()

    def _halve(self, name: str, what: str, sizes: Sequence[int]) -> None:
        """Halve what is read at a time: first how many windows together, then the pieces of one."""
        gc.collect()
        if self.place.type == "cuda":
            torch.cuda.empty_cache()
        longest, together = max(sizes), min(self.batch_tokens, sum(sizes))
        if together >= 2 * longest:
            self.batch_tokens = together // 2
            logger.warning("out of memory on %r: once more, with half as many windows together", name)
            return
        piece = min(self.chunk or self.long.size(longest), longest)
        whole = False in self._possible.values()
        self.halvings += 1
        if self.halvings > HALVINGS:
            how = "and it can only be read in one piece" if whole else f"even in pieces of {piece} tokens"
            raise RopeExtendError(
                f"out of memory on {name!r} {how} ({what}); ask for shorter lengths, a smaller dtype or "
                "another device"
            )
        self.chunk_bytes = max(1, self.chunk_bytes // 2)
        self.chunk, self.asked = max(1, piece // 2), False
        logger.warning("out of memory on %r: once more, in pieces of %d tokens", name, self.chunk)

    def _windows(self, ids: torch.Tensor, windows: Sequence[Window], begin: int | None) -> Losses:
        def shape(w: Window) -> tuple[int, int, int]:
            return w.stop - w.start, w.first - w.start, w.end - w.start

        losses = []
        for (read, first, end), alike in itertools.groupby(windows, shape):
            many = list(alike)
            at_once = max(1, self.batch_tokens // read)
            for low in range(0, len(many), at_once):
                batch = many[low : low + at_once]
                inputs = torch.stack([ids[w.start : w.stop] for w in batch]).to(self.place)
                if begin is not None:
                    inputs[:, 0] = begin
                targets = torch.stack([ids[w.first : w.end] for w in batch]).to(self.place)
                losses.append(self.losses(inputs, targets, first, end).flatten().float().cpu().numpy())
                self.bar.update(inputs.numel())
        return np.concatenate(losses)

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Losses ``[B, end − first]`` of the targets at ``first … end−1`` of windows ``[B, T]``."""
        losses = []
        at = 0
        for hidden in self._hidden(inputs):
            # The state at t predicts the token at t + 1.
            low, high = max(at, first - 1), min(at + hidden.shape[1], end - 1)
            if low < high:
                piece = targets[:, low + 1 - first : high + 1 - first]
                states = hidden[:, low - at : high - at]
                head = output_head(self.model)  # for these only: it keeps the memory of a chunk's logits
                losses.append(
                    token_losses(
                        states, head, piece, chunk_bytes=self.chunk_bytes, vocabulary=self.vocabulary
                    )
                )
                del head
            at += hidden.shape[1]
        return torch.cat(losses, dim=1)

    def _hidden(self, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
        """The decoder's last states, ``[B, t, D]`` at a time."""
        tokens = inputs.shape[1]
        size = self.chunk or self.long.size(tokens)
        if size >= tokens or not self.in_pieces(tokens, size):
            yield self.long.whole(inputs)
        else:
            yield from self.long.in_pieces(inputs, size)

    def in_pieces(self, tokens: int, size: int) -> bool:
        """Whether a cache gives what one forward gives: whether the tables are equal at all lengths."""
        if self.asked and self.long.way is None:
            raise RopeExtendError(
                f"{self.long.config.model_type} does not give in pieces what it gives in one forward; "
                "measure it without chunk"
            )
        key = tokens, size
        if key not in self._possible:
            self._possible[key] = self.long.way is not None and self._one_table(tokens, size)
        if self.asked and not self._possible[key]:
            raise RopeExtendError(
                f"this model's position tables change between {size} and {tokens} tokens, which cached keys "
                "cannot follow; measure it without chunk, or with an encoding that is exact per query"
            )
        return self._possible[key]

    def _one_table(self, tokens: int, size: int) -> bool:
        try:
            return len(length_groups(self.model, [*range(size, tokens, size), tokens])) == 1
        except UnsupportedModelError:  # then nothing is known about its tables
            return False


class _Finished:
    """A directory with the losses of the documents that are done, and with what they are of."""

    def __init__(self, directory: Path, key: dict[str, Any]) -> None:
        """Nothing is written before the first document is done.

        Raises:
            RopeExtendError: the directory holds the losses of another measurement.
        """
        self.directory, self.key = directory, json.loads(json.dumps(key))
        path = directory / "measurement.json"
        if not path.exists():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        other = [name for name in {**before, **self.key} if before.get(name) != self.key.get(name)]
        if other:
            raise RopeExtendError(
                f"{str(directory)!r} holds part of another measurement: it differs in {', '.join(other)} "
                f"({before.get(other[0])} there, {self.key.get(other[0])} here); remove it to start again"
            )

    def read(self, number: int, plans: Sequence[Sequence[Window]]) -> tuple[list[Losses], float] | None:
        """A document's losses by pass, and the seconds they took; None if it is not done."""
        try:
            with np.load(self._path(number)) as arrays:
                losses = [arrays[f"losses_{n}"] for n in range(len(plans))]
                seconds = float(arrays["seconds"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        sizes = [sum(w.end - w.first for w in windows) for windows in plans]
        return (losses, seconds) if [len(one) for one in losses] == sizes else None

    def write(self, number: int, losses: Sequence[Losses], seconds: float) -> None:
        path = self.directory / "measurement.json"
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            whole = path.with_suffix(f".{os.getpid()}.tmp")  # other processes write the same
            whole.write_text(json.dumps(self.key, indent=1), encoding="utf-8")
            os.replace(whole, path)
        arrays = {f"losses_{n}": one for n, one in enumerate(losses)}
        write_arrays(self._path(number), {**arrays, "seconds": np.float64(seconds)})

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:05d}.npz"


def _identity(model: torch.nn.Module) -> dict[str, Any]:
    """What tells one model from another: its encoding, dtype, and a norm of each of its weights."""
    lm = causal_lm(model)
    patch = current_patch(model)
    norms = []
    for path, module in model.named_modules():
        with align_module_device(module):  # weights that are elsewhere until they are needed
            for name, tensor in module.named_parameters(path, recurse=False):
                wide = torch.float32 if tensor.device.type == "mps" else torch.float64
                values = tensor.detach() if tensor.is_floating_point() else tensor.detach().to(wide)
                norms.append(f"{name} {float(torch.linalg.vector_norm(values, dtype=wide)):.5e}")
    return {
        "encoding": patch.encoding.to_dict() if patch else getattr(lm.config, "rope_parameters", None),
        "dtype": str(lm.dtype),
        "weights": hashlib.sha256("\n".join(norms).encode()).hexdigest()[:16],
    }


def _out_of_memory(error: BaseException) -> bool:
    # A CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _texts(rule: Protocol, documents: Sequence[Document], length: int) -> list[Document]:
    """What a protocol reads: the documents that are long enough, cut to the length where it reads no more."""
    if rule.joined:
        if not documents:
            raise RopeExtendError("no documents to measure perplexity on")
        return [Document("all documents", torch.cat([document.input_ids for document in documents]))]
    used = _long_enough(documents, length + rule.beyond)
    return [Document(one.name, one.input_ids[:length]) for one in used] if rule.nested else used


def _long_enough(documents: Sequence[Document], length: int) -> list[Document]:
    used = [document for document in documents if len(document) >= length]
    if not used:
        if not documents:
            raise RopeExtendError("no documents to measure perplexity on")
        longest = max(documents, key=len)
        raise RopeExtendError(
            f"none of {len(documents)} documents has {length:,} tokens: the longest, {longest.name!r}, has "
            f"{len(longest):,}. Lengths up to {len(longest):,} work, or give longer texts"
        )
    if len(used) < len(documents):
        logger.info(
            "%d of %d documents are shorter than %s tokens and are left out at every length",
            len(documents) - len(used), len(documents), format_length(length),
        )  # fmt: skip
    return used


def _check_vocabulary(documents: Sequence[Document], lm: Any) -> None:
    rows = lm.get_input_embeddings().weight.shape[0]
    highest = max(int(document.input_ids.max()) for document in documents)
    if highest >= rows:
        raise RopeExtendError(
            f"the documents contain token {highest}, but the model knows {rows} tokens: they were tokenised "
            "for another model; load them with this model's tokenizer"
        )


@contextmanager
def _evaluating(model: torch.nn.Module, lm: Any, device: torch.device | str | None) -> Iterator[torch.device]:
    """Put a model into evaluation mode on a device, and back module by module, whatever happens."""
    modes = {module: module.training for module in model.modules()}
    home = input_device(lm)
    place = home if device is None else torch.device(device)
    if place != home and is_spread(lm):
        raise RopeExtendError(
            f"this model is spread over devices and cannot be moved to {place}; leave it out"
        )
    try:
        model.eval()
        if place != home:
            model.to(place)
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)
        yield place
    finally:
        for module, training in modes.items():
            module.training = training
        if place != home:
            model.to(home)


def peak_memory_bytes(device: torch.device) -> int:
    """Highest allocation on a CUDA device since its count was reset; else the process's highest so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
