"""Tools of an accounts-payable clerk: the purchase-order register, a calculator and the budget of the order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import BaseModel, Field

from data_contracts.records import Task
from domain_rewards.environments.base import ToolEnvironment, ToolError, tool
from domain_rewards.environments.calculator import calculate
from infra.errors import UsageError

LIMIT_OF_ORDER = sa.text("SELECT spending_limit FROM purchase_orders WHERE number = :key")
LIMIT_OF_INVOICE = sa.text(
    "SELECT spending_limit FROM purchase_orders JOIN invoices ON number = po_number WHERE invoice_id = :key"
)


class PurchaseOrder(BaseModel):
    """What the register says about a purchase order."""

    spending_limit: int


class Value(BaseModel):
    """A calculated number."""

    value: int


class Budget(BaseModel):
    """What is left of the purchase order; negative when the amount is over its limit."""

    remaining: int


class InvoiceApproval(ToolEnvironment):
    """One invoice. Options: ``database``, the SQLAlchemy URL of the register."""

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        super().__init__(task, options)
        self._engine = engine(options["database"])

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """``database`` must be a SQLAlchemy URL without open variables."""
        url = str(options.get("database", ""))
        try:
            sa.make_url(url)
        except sa.exc.ArgumentError:
            problem = "is missing" if not url else f"is not a SQLAlchemy URL: {url}"
        else:
            problem = f"has a variable without a value: {url}" if "${" in url else ""
        if problem:
            raise UsageError(
                f"the option database {problem}",
                where="domain.yaml, environment.options.database",
                fix="write for example sqlite:///${SENMON_HOME}/data/invoice_approval.db",
            )

    @tool
    def purchase_order(self, number: Annotated[str, Field(pattern="^[0-9]{4}$")]) -> PurchaseOrder:
        """Look a purchase order up by its four-digit number."""
        limit = self._spending_limit(LIMIT_OF_ORDER, number)
        if limit is None:
            raise ToolError("not_found")
        return PurchaseOrder(spending_limit=limit)

    @tool
    def calculator(self, expression: str) -> Value:
        """Calculate with integers, + - * and parentheses."""
        return Value(value=calculate(expression))

    @tool
    def budget_check(self, amount: Annotated[int, Field(ge=0, le=10**9)]) -> Budget:
        """Budget that remains on this invoice's purchase order after paying the amount; negative means over."""
        limit = self._spending_limit(LIMIT_OF_INVOICE, self.task.task_id)
        if limit is None:
            raise LookupError(f"invoice {self.task.task_id} is not in the database")
        return Budget(remaining=limit - amount)

    def _spending_limit(self, query: sa.TextClause, key: str) -> int | None:
        with self._engine.connect() as connection:
            limit: int | None = connection.execute(query, {"key": key}).scalar_one_or_none()
        return limit


@cache
def engine(url: str) -> sa.Engine:
    """One connection pool per database and process; SQLite files are opened read-only and never created."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        file = Path(parsed.database).resolve().as_uri()
        parsed = parsed.set(database=file, query={"mode": "ro", "uri": "true"})
    return sa.create_engine(parsed)
