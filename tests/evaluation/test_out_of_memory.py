"""Memory that runs out while perplexity is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_perplexity import measure, texts, tiny

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.chunked_forward import TRIAL_CHUNKS


class Small:
    """A hook of the first layer that imitates a device with memory for only `fits` tokens at a time."""

    def __init__(self, fits: int, error: Exception) -> None:
        self.fits, self.error, self.sizes = fits, error, []

    def __call__(self, _module: object, states: tuple[torch.Tensor]) -> None:
        size = states[0].shape[:2].numel()
        if size > sum(TRIAL_CHUNKS):
            self.sizes.append(size)
        if size > self.fits:
            raise self.error


def test_if_memory_runs_out_the_document_is_repeated_in_smaller_chunks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, documents = tiny(), texts(96, 96, 96)
    whole = measure(model, documents, [48, 96])
    small = Small(30, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    handle = model.model.layers[0].register_forward_pre_hook(small)
    result = measure(model, documents, [48, 96])
    handle.remove()
    # The first document fails whole and in halves. The others start with what fits.
    assert small.sizes == [96, 48] + [24] * 12
    assert caplog.text.count("retrying in chunks of") == 2
    assert "'text0': retrying in chunks of 24 tokens" in caplog.text
    np.testing.assert_allclose(result.nll_by_position, whole.nll_by_position, rtol=1e-5, atol=1e-5)
    assert result.forward_tokens == whole.forward_tokens


@pytest.mark.slow
def test_if_memory_runs_out_batches_get_smaller() -> None:
    model, documents = tiny(), texts(96)
    whole = measure(model, documents, [16], protocol="sliding", stride=4)
    small = Small(16, torch.OutOfMemoryError("CUDA out of memory"))
    handle = model.model.layers[0].register_forward_pre_hook(small)
    result = measure(model, documents, [16], protocol="sliding", stride=4)
    handle.remove()
    assert result.ppl[16] == pytest.approx(whole.ppl[16], rel=1e-5)
    assert [size for size in small.sizes if size > 16] == [320, 160, 80, 32]
    assert small.sizes[-21:] == [16] * 21


@pytest.mark.slow
def test_too_little_memory_is_one_clear_error() -> None:
    model, documents = tiny(), texts(96)
    handle = model.model.layers[0].register_forward_pre_hook(
        Small(0, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    )
    with pytest.raises(
        RopeExtendError, match=r"out of memory on 'text0', even in chunks of .*Tried to allocate"
    ):
        measure(model, documents, [96])
    handle.remove()

    def stopped(*_: object) -> None:
        raise RuntimeError("stopped by the test")

    handle = model.model.register_forward_pre_hook(stopped)
    with pytest.raises(RuntimeError, match="stopped by the test"):  # other errors are not caught
        measure(model, documents, [96])
    handle.remove()
