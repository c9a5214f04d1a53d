"""Documents as users pass them to `rope_extend.perplexity`: documents, token ids, or text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch

from rope_extend.data.documents import Document
from rope_extend.errors import RopeExtendError

DocumentLike: TypeAlias = "Document | torch.Tensor | Sequence[int] | str"
"""A document, its token ids as a 1-D tensor or a list, or its text."""


def documents_from(
    documents: DocumentLike | Iterable[DocumentLike], tokenizer: Any | None = None
) -> list[Document]:
    """Documents from one value or from several, each a document, token ids, or text.

    Args:
        documents: a `Document`, a 1-D tensor or a list of token ids, a string, or an iterable of these, such
            as a batch `[B, T]`.
        tokenizer: the model's tokenizer, for strings. It adds the special tokens that it adds by default.

    Raises:
        RopeExtendError: a value of another type or shape, or a string without a tokenizer.
    """
    given: Any = documents
    if isinstance(documents, torch.Tensor | np.ndarray) and documents.ndim == 2:
        given = list(documents)  # a batch
    is_ids = isinstance(given, Sequence) and given and all(isinstance(each, Integral) for each in given)
    if is_ids or isinstance(given, Document | torch.Tensor | np.ndarray | str):
        given = [given]
    elif not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise RopeExtendError(_problem("documents", documents))
    return [_document(value, f"document {n}", tokenizer) for n, value in enumerate(given)]


def _document(value: Any, name: str, tokenizer: Any | None) -> Document:
    if isinstance(value, Document):
        return value
    if isinstance(value, str):
        if tokenizer is None:
            raise RopeExtendError(
                f"{name} is a string, and no tokenizer is given; pass tokenizer=, the tokenizer of the model"
            )
        value = tokenizer(value, verbose=False)["input_ids"]
    if not isinstance(value, torch.Tensor | np.ndarray | Sequence) or isinstance(value, bytes | bytearray):
        raise RopeExtendError(_problem(name, value))
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RopeExtendError(f"{_problem(name, value)} ({error})") from error
    if ids.shape == (0,):  # torch takes an empty list for float32
        ids = ids.to(torch.int64)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise RopeExtendError(f"{_problem(name, value)} of {ids.dtype} and shape {tuple(ids.shape)}")
    return Document(name, ids.detach().to("cpu", torch.int64))


def _problem(name: str, value: Any) -> str:
    hint = "; of a tokenizer's output, pass the input_ids" if isinstance(value, Mapping) else ""
    return (
        f"{name} must be a Document, a 1-D tensor or list of whole numbers, which are token ids, or a string "
        f"with tokenizer=; several go into a list; got {type(value).__name__}{hint}"
    )
