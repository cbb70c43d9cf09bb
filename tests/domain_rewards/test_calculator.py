"""The calculator's parser."""

from __future__ import annotations

import random

import pytest

from domain_rewards.environments.base import ToolError
from domain_rewards.environments.calculator import calculate


def random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return str(rng.randint(0, 99))
    left, right = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    joined = f"{left}{rng.choice(['+', '-', '*', ' * ', ' - '])}{right}"
    return rng.choice([joined, f"({joined})", f"-({joined})"])


def test_agrees_with_python() -> None:
    rng = random.Random(1)
    checked = 0
    while checked < 500:
        expression = random_expression(rng, 3)
        if len(expression) <= 64:
            assert calculate(expression) == eval(expression), expression  # our own text, not a model's
            checked += 1


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ("", "invalid_expression"),
        ("3*", "invalid_expression"),
        ("3 4", "invalid_expression"),
        ("(3", "invalid_expression"),
        ("3)", "invalid_expression"),
        ("2**9", "invalid_expression"),
        ("7/2", "invalid_expression"),
        ("+3", "invalid_expression"),
        ("1_000", "invalid_expression"),
        ("٣+1", "invalid_expression"),
        ("7²", "invalid_expression"),
        ("1\n+2", "invalid_expression"),
        ("__import__('os').getcwd()", "invalid_expression"),
        ("(" * 20 + "1" + ")" * 20, "invalid_expression"),
        ("-" * 40 + "1", "invalid_expression"),
        ("1" * 65, "too_long"),
        ("9" * 13, "too_large"),
        ("999999*9999999", "too_large"),
        ("999999*9999999*0", "too_large"),  # intermediate values count
    ],
)
def test_refusals(expression: str, code: str) -> None:
    with pytest.raises(ToolError) as raised:
        calculate(expression)
    assert raised.value.code == code
