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
    several: Any = documents
    if isinstance(documents, torch.Tensor | np.ndarray):
        several = documents if documents.ndim == 2 else [documents]  # a batch, or one
    elif isinstance(documents, Document | Mapping | str) or not isinstance(documents, Iterable):
        several = [documents]
    elif isinstance(documents, Sequence) and documents:
        several = [documents] if all(isinstance(item, Integral) for item in documents) else documents
    return [_document(each, number, tokenizer) for number, each in enumerate(several)]


def _document(value: Any, number: int, tokenizer: Any | None) -> Document:
    name = f"document {number}"
    if isinstance(value, Document):
        return value
    if isinstance(value, str):
        if tokenizer is None:
            raise RopeExtendError(
                f"{name} is a string, and no tokenizer is given; pass tokenizer=, the tokenizer of the model"
            )
        value = tokenizer(value, verbose=False)["input_ids"]
    if not isinstance(value, torch.Tensor | np.ndarray | Sequence) or isinstance(value, bytes | bytearray):
        hint = "; of a tokenizer's output, pass the input_ids" if isinstance(value, Mapping) else ""
        raise RopeExtendError(
            f"{name}: documents must be a Document, a 1-D tensor or list of token ids, a string with "
            f"tokenizer=, or a list of these; got {type(value).__name__}{hint}"
        )
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RopeExtendError(f"{name}: token ids must be whole numbers of 64 bits; {error}") from error
    if ids.shape == (0,):  # torch takes an empty list for float32
        ids = ids.to(torch.int64)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise RopeExtendError(
            f"{name}: token ids must be a 1-D tensor of whole numbers; got {ids.dtype} of shape "
            f"{tuple(ids.shape)}; pass a batch as a list of its rows"
        )
    return Document(name, ids.detach().to("cpu", torch.int64))
