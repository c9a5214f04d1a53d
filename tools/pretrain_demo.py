"""Pretrain the demonstration model from the Python sources of this environment, on the CPU.

    python tools/pretrain_demo.py                                        # train (about 80 minutes)
    python tools/pretrain_demo.py --resume                               # resume from the checkpoint
    python tools/pretrain_demo.py --resume --total-tokens 30000000       # end earlier: decay from here
    python tools/pretrain_demo.py --resume --export rope_extend/demo/model

The tokenizer, the token stream, the checkpoint, the loss curve and the final measurements go to the
output directory. Training computes in bfloat16 with float32 master weights and optimizer states. The
learning rate depends only on the tokens seen: warm-up, constant, then linear decay to zero.
"""

import argparse
import copy
import csv
import dataclasses
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import yaml
from pretrain_corpus import key_value_document, pretraining_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rope_extend.data.bundled import evaluation_files, passkey_document, read_text

END_OF_TEXT = "<|endoftext|>"
Config = dict[str, Any]


def main() -> None:
    arguments = parse_arguments()
    config: Config = yaml.safe_load(arguments.config.read_text())
    if arguments.total_tokens is not None:
        config["training"]["total_tokens"] = arguments.total_tokens
    output: Path = arguments.output
    if (output / "checkpoint.pt").exists() and not arguments.resume:
        raise SystemExit(f"{output} already holds a checkpoint: give --resume, or another --output")
    if arguments.export and arguments.export.exists() and not arguments.overwrite:
        raise SystemExit(f"{arguments.export} already exists: give --overwrite to replace it")
    output.mkdir(parents=True, exist_ok=True)
    stream = prepare_text(output, config)
    trainer = Trainer(output, config, stream, load_tokenizer(output))
    if not trainer.train(arguments.max_steps):
        log(f"stopped after {arguments.max_steps} steps of this run; resume with --resume")
        return
    model = trainer.master
    results = measure(model, trainer.tokenizer, windows=None)
    results |= {"tokens": trainer.tokens, "steps": trainer.step, "seconds": round(trainer.seconds)}
    log(f"final: {results}")
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    if arguments.export:
        export(output, model, trainer.tokenizer, arguments.export)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/pretrain_demo.yaml"))
    parser.add_argument("--output", type=Path, default=Path("runs/pretrain_demo"))
    parser.add_argument(
        "--resume", action="store_true", help="resume from the checkpoint in the output directory"
    )
    parser.add_argument("--total-tokens", type=int, help="replaces training.total_tokens, also when resuming")
    parser.add_argument(
        "--max-steps", type=int, help="stop this run after this number of steps, and write a checkpoint"
    )
    parser.add_argument("--export", type=Path, help="directory for the final Hugging Face checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="let --export replace a directory")
    return parser.parse_args()


def log(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def prepare_text(output: Path, config: Config) -> np.ndarray:
    """Choose the corpus, train the tokenizer and write the token stream, unless an earlier run did."""
    stream, manifest = output / "tokens.npy", output / "corpus.json"
    if not (stream.exists() and manifest.exists()):
        corpus = pretraining_corpus(**config["corpus"])
        texts = [read_text(path) for path in corpus.files]
        log(f"corpus: {corpus.report.kept} files, {corpus.report.kept_bytes / 1e6:.1f} MB")
        train_tokenizer(texts, config).save(str(output / "tokenizer.json"))
        tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
        end = tokenizer.token_to_id(END_OF_TEXT)
        pieces: list[np.ndarray] = []
        for start in range(0, len(texts), 256):
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 256]):
                pieces.append(np.asarray([end, *encoding.ids], dtype=np.uint16))
        tokens = np.concatenate(pieces)
        np.save(stream, tokens)
        report = dataclasses.asdict(corpus.report) | {"tokens": len(tokens)}
        manifest.write_text(json.dumps(report, indent=1) + "\n")
        log(f"token stream: {len(tokens):,} tokens")
    return np.load(stream, mmap_mode="r")


def train_tokenizer(texts: Sequence[str], config: Config) -> Tokenizer:
    """Train a byte-level BPE tokenizer in which every digit is a separate token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config["tokenizer"]["vocab_size"],
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_until(texts, config["tokenizer"]["sample_bytes"]), trainer)
    return tokenizer


def _until(texts: Sequence[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def load_tokenizer(output: Path) -> PreTrainedTokenizerFast:
    # One token is beginning, end and padding, as in GPT-2: the stream has no other boundary mark.
    return PreTrainedTokenizerFast(
        tokenizer_file=str(output / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


class Batches:
    """Training batches as a function of seed and step only, so that a resumed run repeats none."""

    def __init__(self, stream: np.ndarray, tokenizer: PreTrainedTokenizerFast, config: Config) -> None:
        training = config["training"]
        self.stream, self.tokenizer, self.seed = stream, tokenizer, config["seed"]
        self.window = config["model"]["max_position_embeddings"]
        self.retrieval: int = training["retrieval_sequences"]
        self.code: int = training["sequences_per_step"] - self.retrieval
        self.per_epoch = (len(stream) - 2 * self.window) // self.window
        self._order: tuple[int, np.ndarray] | None = None

    def __getitem__(self, step: int) -> Tensor:
        first = step * self.code
        rows = [self._code_window(index) for index in range(first, first + self.code)]
        rows += [self._retrieval_window(step, row) for row in range(self.retrieval)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _code_window(self, index: int) -> np.ndarray:
        epoch, number = divmod(index, self.per_epoch)
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            # Another offset in each epoch: the windows of the second epoch start at other tokens.
            starts = rng.permutation(self.per_epoch) * self.window + rng.integers(self.window)
            self._order = (epoch, starts)
        start = int(self._order[1][number])
        return self.stream[start : start + self.window + 1]

    def _retrieval_window(self, step: int, row: int) -> np.ndarray:
        rng = random.Random(f"{self.seed} {step} {row}")
        end: int = self.tokenizer.eos_token_id
        ids: list[int] = []
        while len(ids) <= self.window:
            ids += [end, *self.tokenizer.encode(retrieval_text(rng), add_special_tokens=False)]
        return np.asarray(ids[: self.window + 1])


def retrieval_text(rng: random.Random) -> str:
    """One synthetic document. Lengths are mixed, so that answers are at many distances."""
    if rng.random() < 0.5:
        return passkey_document(rng, filler_lines=rng.randint(1, 16)).text
    return key_value_document(rng, pairs=rng.randint(2, 14), queries=rng.randint(1, 3)).text


class TiedCrossEntropy(torch.autograd.Function):
    """Next-token loss from hidden states in chunks: the logits of a whole batch never exist at once.

    The forward pass also computes the gradients, because it has the probabilities of the chunk.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        count = len(targets)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32)
        losses = torch.empty(count)
        for start in range(0, count, 2048):
            part = slice(start, start + 2048)
            probabilities = torch.softmax((hidden[part] @ weight.T).float(), dim=-1)
            index = targets[part].unsqueeze(1)
            right = probabilities.gather(1, index)
            losses[part] = -right.clamp_min(1e-30).log().squeeze(1)
            gradient = probabilities.scatter_(1, index, right - 1).to(hidden.dtype)
            hidden_gradient[part] = gradient @ weight
            weight_gradient += gradient.T @ hidden[part]
        ctx.save_for_backward(hidden_gradient / count, weight_gradient / count)
        ctx.mark_non_differentiable(losses)
        return losses.mean(), losses

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        weight_gradient = (weight_gradient * loss_gradient).to(hidden_gradient.dtype)
        return hidden_gradient * loss_gradient, weight_gradient, None


class Trainer:
    """The model, its optimizers and the position in the run; saved and restored as one checkpoint."""

    def __init__(
        self, output: Path, config: Config, stream: np.ndarray, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        torch.manual_seed(config["seed"])
        self.output, self.config, self.tokenizer = output, config, tokenizer
        self.training = config["training"]
        self.batches = Batches(stream, tokenizer, config)
        self.master = LlamaForCausalLM(model_config(config, tokenizer))
        self.compute = copy.deepcopy(self.master)
        for parameter in self.compute.parameters():
            # Not .to(bfloat16): that would round the rotary frequencies, which are a buffer.
            parameter.data = parameter.data.to(torch.bfloat16)
        # One single-threaded worker per core, each with its own gradients. A core that other programs slow
        # down then gets fewer parts of the batch; a parallel matrix product would wait for it.
        workers = os.cpu_count() or 1
        self.pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        self.replicas: SimpleQueue[LlamaForCausalLM] = SimpleQueue()
        for _ in range(workers):
            replica = copy.deepcopy(self.compute)
            for parameter, shared in zip(replica.parameters(), self.compute.parameters(), strict=True):
                parameter.data = shared.data
            self.replicas.put(replica)
        self.optimizers = self._optimizers()
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.tokens_per_step = self.training["sequences_per_step"] * self.batches.window
        if (output / "checkpoint.pt").exists():
            self._restore()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        training = self.training
        blocks = [p for p in self.master.model.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in blocks}
        others = [p for p in self.master.parameters() if id(p) not in known]
        muon = torch.optim.Muon(
            blocks,
            lr=training["muon_learning_rate"],
            momentum=training["muon_momentum"],
            weight_decay=training["weight_decay"],
        )
        adam = torch.optim.AdamW(
            others, lr=training["adam_learning_rate"], betas=tuple(training["adam_betas"]), weight_decay=0.0
        )
        return [muon, adam]

    def train(self, max_steps: int | None = None) -> bool:
        """Train up to the planned tokens; False if `max_steps` ended the run earlier."""
        training = self.training
        saved = time.monotonic()
        first, begun, before = self.step, time.monotonic(), self.seconds
        marked, mark = self.step, begun
        with (self.output / "loss_curve.jsonl").open("a") as curve:
            while self.tokens < training["total_tokens"]:
                code_loss, retrieval_loss, norm = self._train_step()
                now = time.monotonic()
                self.seconds = before + now - begun
                last = self.tokens >= training["total_tokens"]
                if self.step % training["log_every"] == 0 or last:
                    speed = (self.step - marked) * self.tokens_per_step / (now - mark)
                    marked, mark = self.step, now
                    record: Config = {
                        "step": self.step,
                        "tokens": self.tokens,
                        "seconds": round(self.seconds, 1),
                        "loss": round(code_loss, 4),
                        "retrieval_loss": round(retrieval_loss, 4),
                        "gradient_norm": round(norm, 3),
                        "learning_rate_factor": round(self._rate(), 4),
                    }
                    if self.step % training["evaluate_every"] == 0:
                        record |= measure(self.master, self.tokenizer, training["evaluation_windows"])
                    curve.write(json.dumps(record) + "\n")
                    curve.flush()
                    left = (training["total_tokens"] - self.tokens) / speed / 60
                    log(f"{record} {speed:,.0f} tokens/s, {left:.0f} min left")
                stop = max_steps is not None and self.step - first >= max_steps
                if now - saved > training["checkpoint_seconds"] or last or stop:
                    self._save()
                    saved = now
                if stop and not last:
                    return False
        return True

    def _rate(self) -> float:
        """The factor on the learning rate, from 0 to 1, at the tokens seen so far."""
        warmup = min(1.0, (self.step + 1) / self.training["warmup_steps"])
        total = self.training["total_tokens"]
        left = (total - self.tokens) / (total * self.training["decay_fraction"])
        return max(0.0, min(warmup, left))

    def _train_step(self) -> tuple[float, float, float]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * self._rate()
        ids = self.batches[self.step]
        parts = ids.split(self.training["sequences_per_part"])
        results = list(self.pool.map(self._gradients, parts))
        # Summed in the order of the parts, not of the workers, so that every run is the same.
        for index, master in enumerate(self.master.parameters()):
            gradients = [gradient[index].float() for gradient, _ in results]
            master.grad = torch.stack(gradients).sum(0) / len(parts)
        losses = torch.cat([loss for _, loss in results])
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), self.training["gradient_clip"])
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, compute in zip(self.master.parameters(), self.compute.parameters(), strict=True):
                compute.copy_(master)
        self.step += 1
        self.tokens += self.tokens_per_step
        by_row = losses.view(len(ids), -1)
        code = self.batches.code
        return by_row[:code].mean().item(), by_row[code:].mean().item(), norm.item()

    def _gradients(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Gradients of one part, in the order of the parameters, and losses by token; runs in a worker."""
        replica = self.replicas.get()
        hidden = replica.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss, losses = TiedCrossEntropy.apply(
            hidden.flatten(0, 1), replica.lm_head.weight, ids[:, 1:].flatten()
        )
        loss.backward()
        gradients = [parameter.grad for parameter in replica.parameters()]
        replica.zero_grad(set_to_none=True)
        self.replicas.put(replica)
        return gradients, losses

    def _save(self) -> None:
        state = {
            "model": self.master.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        partial = self.output / "checkpoint.pt.partial"
        torch.save(state, partial)
        partial.replace(self.output / "checkpoint.pt")  # A killed run leaves the old checkpoint intact.

    def _restore(self) -> None:
        state = torch.load(self.output / "checkpoint.pt", weights_only=True)
        self.master.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        with torch.no_grad():
            for master, compute in zip(self.master.parameters(), self.compute.parameters(), strict=True):
                compute.copy_(master)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        log(f"resumed at step {self.step}, {self.tokens:,} tokens")


def model_config(config: Config, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    settings = dict(config["model"])
    theta = settings.pop("rope_theta")
    end = tokenizer.eos_token_id
    return LlamaConfig(
        vocab_size=len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        attn_implementation="sdpa",
        **settings,
    )


@torch.no_grad()
def measure(model: nn.Module, tokenizer: PreTrainedTokenizerFast, windows: int | None) -> dict[str, Any]:
    """Perplexity on held-out files and greedy retrieval inside the window; `windows=None` uses all."""
    was_training = model.training
    model.eval()
    rows = evaluation_windows(tokenizer, 256)
    if windows is not None:
        rows = rows[torch.linspace(0, len(rows) - 1, windows).long()]
    total, count = 0.0, 0
    for batch in rows.split(16):
        logits = model(input_ids=batch).logits[:, :-1].float()
        total += nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        ).item()
        count += batch[:, 1:].numel()
    documents = 25 if windows is not None else 200
    results: dict[str, Any] = {
        "held_out_loss": round(total / count, 4),
        "held_out_perplexity": round(math.exp(total / count), 3),
        "held_out_tokens": count,
        "passkey_rate": retrieval_rate(model, tokenizer, "passkey", documents),
        "key_value_rate": retrieval_rate(model, tokenizer, "key_value", documents),
    }
    model.train(was_training)
    return results


def evaluation_windows(tokenizer: PreTrainedTokenizerFast, window: int) -> Tensor:
    """The evaluation files in windows that do not overlap, without the short last part of each file."""
    rows: list[Tensor] = []
    for path in evaluation_files():
        ids = torch.tensor(tokenizer.encode(read_text(path), add_special_tokens=False, verbose=False))
        rows.append(ids[: len(ids) // window * window].view(-1, window))
    return torch.cat(rows)


@torch.no_grad()
def retrieval_rate(model: nn.Module, tokenizer: PreTrainedTokenizerFast, kind: str, documents: int) -> float:
    """Share of new retrieval documents, of at most 256 tokens, that greedy decoding answers correctly."""
    solved = 0
    for number in range(documents):
        rng = random.Random(f"evaluation {kind} {number}")
        document = passkey_document(rng) if kind == "passkey" else key_value_document(rng)
        prompt = tokenizer.encode(document.prompt, add_special_tokens=False)
        answer = tokenizer.encode(document.answer, add_special_tokens=False)
        assert len(prompt) + len(answer) <= 256
        # Teacher forcing equals greedy decoding here: the answer is right if every argmax is.
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        solved += logits.argmax(-1).tolist() == answer
    return solved / documents


def export(output: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Write the float16 checkpoint, load it back with stock classes and report its perplexity."""
    if target.exists():
        shutil.rmtree(target)
    half = copy.deepcopy(model).to(torch.float16)
    half.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Stored in float16, loaded in float32: a CPU computes faster and trains better in float32.
    edit_json(target / "config.json", dtype="float32")
    # Every release of transformers with fast tokenizers knows this name.
    edit_json(target / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (target / "model.safetensors").chmod(0o644)
    write_loss_curve(output / "loss_curve.jsonl", target / "loss_curve.csv")
    reloaded = AutoModelForCausalLM.from_pretrained(target)
    log(f"exported to {target}: {measure(reloaded, AutoTokenizer.from_pretrained(target), None)}")


def edit_json(path: Path, **values: str) -> None:
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_loss_curve(source: Path, target: Path) -> None:
    columns = ("step", "tokens", "loss", "retrieval_loss", "learning_rate_factor", "held_out_loss")
    records = {r["step"]: r for r in map(json.loads, source.read_text().splitlines())}
    with target.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for _, record in sorted(
            records.items()
        ):  # A resumed run logs some steps twice; the last line counts.
            writer.writerow([record.get(column, "") for column in columns])


if __name__ == "__main__":
    main()
