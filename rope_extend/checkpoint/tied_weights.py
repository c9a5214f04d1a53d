"""Parameters that a model uses twice, such as embeddings that are also the head, and what unties them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def tied_names(base: Any) -> dict[str, list[str]]:
    """For each tied parameter, the names of the parameters that it is tied to."""
    keys: Mapping[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    clean = {a.replace(".base_layer.", "."): b.replace(".base_layer.", ".") for a, b in keys.items()}
    tied: dict[str, list[str]] = {}
    for first, second in clean.items():
        tied.setdefault(first, []).append(second)
        tied.setdefault(second, []).append(first)
    return tied


def untie_changed(
    base: Any, tied: Mapping[str, list[str]], changed: Mapping[str, Any], replaced: dict[str, Tensor]
) -> list[str]:
    """Untie the parameters that the adapter changes differently; returns their names.

    An adapter on the input embeddings alone leaves the output embeddings unchanged, so one matrix cannot hold
    both.
    """
    untied: list[str] = []
    for name, others in tied.items():
        for other in others:
            same = replaced.get(name) is replaced.get(other) or (
                name in replaced and other in replaced and torch.equal(replaced[name], replaced[other])
            )
            if name in changed or other in changed or not same:
                untied.append(name)
    if untied:
        _untie_config(base)
    return list(dict.fromkeys(untied))


def untie(base: Any, name: str) -> None:
    """Make a tied parameter of a model one of its own, with the same shape and dtype and new values."""
    path, _, leaf = name.rpartition(".")
    module = base.get_submodule(path)
    setattr(module, leaf, nn.Parameter(torch.empty_like(getattr(module, leaf)), requires_grad=False))
    del base.all_tied_weights_keys[name]
    _untie_config(base)


@contextmanager
def config_as_loaded(base: Any) -> Iterator[None]:
    """Let the config say within the context that head and embeddings are two matrices, if they are.

    transformers leaves them apart on loading if the files hold two matrices, whatever the config says. Other
    readers follow the config.
    """
    configs = (base.config, base.config.get_text_config())
    before = [getattr(config, "tie_word_embeddings", None) for config in configs]
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    tied = any(before) and base.get_expanded_tied_weights_keys(all_submodels=True)
    if tied and head is not None and head.weight is not embeddings.weight and not tied_names(base):
        _untie_config(base)
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            if value is not None:
                config.tie_word_embeddings = value


def _untie_config(base: Any) -> None:
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False
