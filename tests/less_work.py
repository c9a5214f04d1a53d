"""Work around the checks that takes long and is not what they look at: done once, or not at all."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rope_extend.models.view import unwrap
from rope_extend.patching import current_patch


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing is compiled on import: bitsandbytes, which peft imports, would do so for half a second."""
    with mock.patch("torch.compile", lambda function=None, **_: function or (lambda each: each)):
        return (yield)


MANY = 1000
"""Tests from which on every worker has some of every family."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Change the modules that the tests of this process have imported."""
    if session.config.getoption("--workers") > 1 and len(session.items) > MANY:
        import_families()  # once, and not in every worker
    estimates, adapters = (
        sys.modules.get(name) for name in ("rope_extend.evaluation.forward_plan", "peft.peft_model")
    )
    reach = sys.modules.get("rope_extend.training.text_reach")
    if estimates is not None:
        estimates.operations_of = once(estimates.operations_of)
    if reach is not None:
        reach._dry_run = once(reach._dry_run)
    if adapters is not None:
        adapters.PeftModel.create_or_update_model_card = short_card
    # pytest adds its handlers to each logger that does not propagate, six times a test.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def import_families() -> None:
    """Import the models of all families."""
    from cases import FAMILIES, tiny_config
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    for case in FAMILIES:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(case))]


def once(dry_run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A dry run on the meta device that models of one class, config and encoding share.

    Its own tests call the function itself, or are the first that need a model's result.
    """
    known: dict[Any, Any] = {}

    def remembered(model: Any) -> Any:
        patch, lm = current_patch(model), unwrap(model)
        key = (
            type(model),
            lm.config.to_json_string(use_diff=False),
            lm.config._attn_implementation,
            repr(patch and patch.encoding),
            tuple((name, weight.shape, weight.dtype) for name, weight in model.named_parameters()),
        )
        if key not in known:
            known[key] = dry_run(model)
        return known[key]

    return remembered


def short_card(self: Any, output_dir: str) -> None:
    """Instead of peft's card of an adapter, an empty form that `rope_extend.save` removes."""
    card = Path(output_dir) / "README.md"
    if not card.exists():
        card.write_text("A form that peft writes.\n")
