"""The decision must be right and the amount exact."""

from __future__ import annotations

from domain_rewards.episode import Episode
from domain_rewards.verifiers.base import verifier


@verifier("decision_and_amount")
def decision_and_amount(episode: Episode) -> float:
    """1 for exactly one answer, ``APPROVE <total>`` within the limit or ``REJECT <total>`` above it; else 0."""
    total, limit = int(episode.task.reference["total"]), int(episode.task.reference["po_limit"])
    answers = [each for each in episode.messages if each.role == "assistant" and not each.tool_calls]
    right = f"{'APPROVE' if total <= limit else 'REJECT'} {total}"
    return float(len(answers) == 1 and episode.answer == right)
