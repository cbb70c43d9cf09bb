"""What the embedded engine needs of a model: rows with a key/value cache, fed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Decoder(Protocol):
    """Rows ``0 … size-1``, each with its own past. Not thread-safe."""

    size: int

    def sync(self) -> None:
        """Take over weights that the trainer changed in place; only allowed while there are no rows."""
        ...

    def add(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> torch.Tensor:
        """Append ``copies[i]`` rows per prompt, each prompt computed once; logits ``[sum(copies), vocabulary]``."""
        ...

    chunked: bool
    """Whether :meth:`feed_chunk` is there: many tokens of few rows at once."""

    def feed_chunk(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append ``chunks[i]`` to row ``rows[i]``, nothing to the others; logits ``[len(rows), vocabulary]``."""
        ...

    def feed(self, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Append ``tokens[r]`` to every row with ``active[r]``; logits ``[size, vocabulary]`` (arbitrary if idle)."""
        ...

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        ...
