"""The tokenizer of a GGUF file, made from its lists of tokens, merges and scores.

transformers goes through the tokenizer's slow form, which takes minutes for a vocabulary of 49,152. The lists
are all that a tokenizer needs, but for the pattern that splits a text into words. A file only names it; the
patterns are those of `src/llama-vocab.cpp` in llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_metadata import Metadata, field_value, gguf_metadata

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of a token, of `llama_token_type`."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_PATTERNS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (_QWEN2,)),
}
"""Patterns by `tokenizer.ggml.pre`, applied one after the other."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3")
"""Tokenizers that take a word that is a token as it is, whatever its merges would give."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with its special tokens and its chat template."""
    metadata = gguf_metadata(path)
    keys = _TokenizerKeys(path, metadata)
    kind = keys.value("model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(keys), False
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(keys), True
    else:
        raise RopeExtendError(
            f"{path.name} has a tokenizer of the kind {kind!r}; supported are gpt2 (byte-level BPE) and "
            "llama (SentencePiece BPE). Use the original checkpoint"
        )
    special = {
        name: token
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token := keys.token(f"{key}_token_id")) is not None
    }
    _add_marked_tokens(tokenizer, keys)
    _add_ends(tokenizer, keys, special, adds_bos)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.keys.get("tokenizer.chat_template"),
        model_max_length=metadata.of_architecture("context_length", int(1e30)),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


class _TokenizerKeys:
    """The keys below `tokenizer.ggml`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        lists = {name: field_value(entry) for name, entry in metadata.lists.items()}
        self.name, self._keys = path.name, {**metadata.keys, **lists}
        tokens = self.value("tokens")
        if not tokens:
            raise RopeExtendError(f"{path.name} has no tokenizer (tokenizer.ggml.tokens)")
        self.tokens: list[str] = tokens
        self.types: list[int] = self.value("token_type", [1] * len(self.tokens))
        for key in ("token_type", "scores"):
            if (count := len(self.value(key, self.tokens))) != len(self.tokens):
                raise RopeExtendError(f"{path.name} has {len(self.tokens)} tokens and {count} {key}")
        if len(self.vocabulary) != len(self.tokens):
            twice = next(token for token, count in Counter(self.tokens).items() if count > 1)
            raise RopeExtendError(f"{path.name} has the token {twice!r} twice")

    def value(self, key: str, default: Any = None) -> Any:
        return self._keys.get(f"tokenizer.ggml.{key}", default)

    def token(self, key: str) -> str | None:
        index = self.value(key)
        return self.tokens[index] if index is not None and index < len(self.tokens) else None

    @property
    def vocabulary(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def _byte_level(keys: _TokenizerKeys) -> Tokenizer:
    """Byte-level BPE, as GPT-2's, with the file's merges."""
    kind = keys.value("pre", "default")
    if kind not in _PATTERNS:
        raise RopeExtendError(
            f"{keys.name} splits text into words by the pattern {kind!r} (tokenizer.ggml.pre); supported are "
            f"{', '.join(_PATTERNS)}. Use the original checkpoint"
        )
    merges = keys.value("merges")
    if not merges:
        raise RopeExtendError(f"{keys.name} has no merges (tokenizer.ggml.merges)")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(keys.vocabulary, pairs, ignore_merges=kind in _WHOLE_WORDS))
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[kind]
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(keys: _TokenizerKeys) -> Tokenizer:
    """SentencePiece's BPE: a pair is merged if the result is a token, the highest score first."""
    scores = keys.value("scores")
    if not scores:
        raise RopeExtendError(f"{keys.name} has no scores (tokenizer.ggml.scores)")
    vocabulary = keys.vocabulary
    merges = [
        (-scores[index], index, token[:cut], token[cut:])
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if keys.types[index] == 1 and token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: (*merge[:2], len(merge[2])))
    unknown = keys.token("unknown_token_id") or keys.tokens[0]
    pairs = [(left, right) for *_, left, right in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(keys.value("add_space_prefix", True))
    first, last = ([normalizers.Prepend(_SPACE)], [decoders.Strip(" ", 1, 0)]) if prefixed else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _add_marked_tokens(tokenizer: Tokenizer, keys: _TokenizerKeys) -> None:
    """Tokens that are found in a text before anything else: control tokens, and those that users defined."""
    marked = list(zip(keys.tokens, keys.types, strict=True))
    tokenizer.add_special_tokens([
        AddedToken(token, special=True, normalized=False)
        for token, kind in marked if kind in (_UNKNOWN, _CONTROL)
    ])  # fmt: skip
    tokenizer.add_tokens([
        AddedToken(token, normalized=False) for token, kind in marked if kind == _USER_DEFINED
    ])  # fmt: skip


def _add_ends(tokenizer: Tokenizer, keys: _TokenizerKeys, special: Mapping[str, str], adds_bos: bool) -> None:
    """The tokens that are put before and after each text."""
    by_default = adds_bos or keys.value("pre") in _WHOLE_WORDS
    first = [special["bos"]] if keys.value("add_bos_token", by_default) and "bos" in special else []
    last = [special["eos"]] if keys.value("add_eos_token", False) and "eos" in special else []
    if first or last:
        second = [f"{token}:1" for token in (*first, "$B", *last)]
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *second],
            special_tokens=[(token, keys.tokens.index(token)) for token in dict.fromkeys((*first, *last))],
        )
