"""The engine protocol: what rollout and serving need from whatever generates tokens.

Token ids go in and come out; nothing is re-tokenised. A *sequence* stays open after it stops, so that
a tool result can be appended (:meth:`Engine.extend`) without computing its past again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class StopReason(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one sequence.

    ``max_tokens`` bounds the tokens sampled over the whole life of the sequence (tool results are not counted).
    ``temperature`` 0 is greedy. Sampling draws from a generator of the sequence's own, seeded with ``seed``,
    so a sequence does not depend on its neighbours in the batch. ``top_k`` 0 keeps all tokens.

    Raises:
        ValueError: a number is out of its range or NaN.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1 and self.top_k >= 0 and 0 <= self.min_p <= 1):
            raise ValueError(f"temperature >= 0, 0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1 are needed: {self}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be left out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


@dataclass(frozen=True)
class TokenEvent:
    """One sampled token of one sequence; ``finished`` is set on the last token of a turn.

    ``logprob`` is the log-probability (natural log) under the distribution sampled from; at temperature 0
    it is the one at temperature 1.
    """

    sequence: int
    token: int
    logprob: float
    finished: StopReason | None = None


class Engine(Protocol):
    """Generates token ids for many sequences at once. Not thread-safe: one thread drives it."""

    @property
    def weight_version(self) -> int:
        """Counts weight updates; recorded in every trajectory."""
        ...

    @property
    def context(self) -> int:
        """Most tokens a sequence may have, prompt included; at it a turn ends with ``LENGTH``."""
        ...

    def submit(self, prompt: Sequence[int], sampling: Sequence[SamplingParams]) -> list[int]:
        """Open ``len(sampling)`` sequences on one prompt (computed once) and return their handles."""
        ...

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append given tokens after what a sequence has sampled so far, and let it go on sampling.

        After a stop these are a tool result; to a sequence in the middle of a turn they are forced.
        """
        ...

    def step(self) -> list[TokenEvent]:
        """Advance every running sequence; empty when none is running."""
        ...

    def release(self, sequence: int) -> None:
        """Forget a sequence (running or stopped) and free its memory; unknown handles are ignored."""
        ...
