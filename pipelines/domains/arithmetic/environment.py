"""One tool: a calculator."""

from __future__ import annotations

from pydantic import BaseModel

from domain_rewards.environments.base import ToolEnvironment, tool
from domain_rewards.environments.calculator import calculate


class Value(BaseModel):
    """A calculated number."""

    value: int


class Arithmetic(ToolEnvironment):
    """A sum to work out; no options."""

    @tool
    def calculator(self, expression: str) -> Value:
        """Calculate with integers, + - * and parentheses."""
        return Value(value=calculate(expression))
