"""What the embedded engine needs of a model: rows with a key/value cache, fed token by token."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Decoder(Protocol):
    """Rows ``0 … size-1``, each with its own past. Not thread-safe."""

    size: int

    def sync(self) -> None:
        """Take over the model's present weights, also after :meth:`sleep`; only allowed while there are no rows."""
        ...

    def sleep(self) -> None:
        """Free the copies of weights and the caches; nothing but :meth:`sync` may follow. Only without rows."""
        ...

    def checksum(self) -> int:
        """CRC-32 of the weights taken over at the last :meth:`sync`; what the trainer does since leaves it alone.

        Weights that the decoder keeps in a layout of its own are read now, as the next step would read them.
        """
        ...

    def add(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """Append ``copies[i]`` rows per prompt, each prompt computed once; logits ``[sum(copies), vocabulary]``."""
        ...

    def feed(self, tokens: Tensor, active: Tensor) -> Tensor:
        """Append ``tokens[r]`` to every row with ``active[r]``; logits ``[size, vocabulary]`` (arbitrary if idle)."""
        ...

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        ...


class ChunkDecoder(Decoder, Protocol):
    """A decoder that can also append many tokens to few rows in one forward pass."""

    def feed_chunk(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Append ``chunks[i]`` to row ``rows[i]``, nothing to the others; logits ``[len(rows), vocabulary]``."""
        ...


def crc(tensors: Iterable[Tensor], start: int = 0) -> int:
    """CRC-32 of the tensors' bytes in the order given, continued from ``start``."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        start = zlib.crc32(flat.view(torch.uint8).cpu().numpy().data, start)
    return start
