"""What the policy did in one episode, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

SegmentKind = Literal["turn", "tool_result"]


class EpisodeEnd(StrEnum):
    """Why an episode ended."""

    ANSWER = "answer"
    LENGTH = "length"
    TURNS = "turns"
    MALFORMED = "malformed"
    TOOL_FAILURE = "tool_failure"
    REPETITION = "repetition"


@dataclass(frozen=True)
class Segment:
    """Positions ``start … end - 1`` of the completion."""

    kind: SegmentKind
    start: int
    end: int


@dataclass(frozen=True)
class Trajectory:
    """Exactly the ids that were sampled and appended; never decoded and encoded again.

    ``ids``, ``logprobs`` and ``mask`` align: mask 1 = sampled by the policy, with its log-prob under the
    sampling distribution; 0 = a tool result, log-prob 0. ``reasoning_tokens`` counts sampled tokens inside
    thinking blocks. ``weight_version`` is the engine's at the first sampled token.
    """

    task_id: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    mask: tuple[int, ...]
    segments: tuple[Segment, ...]
    end: EpisodeEnd
    weight_version: int
    reasoning_tokens: int

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled by the policy."""
        return sum(self.mask)


@dataclass(frozen=True)
class Staleness:
    """How many weight versions behind the present one tokens were sampled: the oldest, and the mean over tokens."""

    largest: int
    mean: float


def staleness(versions: Sequence[int], current: int) -> Staleness:
    """Staleness of an episode (or a batch) with these weight versions of its tokens: the oldest counts, not the newest.

    Raises:
        ValueError: no token, or one that is newer than ``current``.
    """
    if not versions or max(versions) > current:
        raise ValueError(f"versions {list(versions)[:5]} do not lie at or before version {current}")
    return Staleness(current - min(versions), sum(current - version for version in versions) / len(versions))
