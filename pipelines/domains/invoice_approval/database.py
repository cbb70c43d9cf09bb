"""The sample database: purchase orders, invoices against them, and two ways of working through an invoice."""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from infra.inference.messages import Message, ToolCall

SEED = 20261127
INVOICES = 4600
DEMONSTRATED = 1400
"""The first this many invoices are demonstrated, each by both clerks."""
SCHEMA_VERSION = 2
"""Changes whenever the tables or the generated rows do: an older file is then replaced."""

METADATA = sa.MetaData()
PURCHASE_ORDERS = sa.Table(
    "purchase_orders",
    METADATA,
    sa.Column("number", sa.String(4), primary_key=True),
    sa.Column("spending_limit", sa.Integer, nullable=False),
)
INVOICE_TABLE = sa.Table(
    "invoices",
    METADATA,
    sa.Column("invoice_id", sa.String(16), primary_key=True),
    sa.Column("po_number", sa.String(4), sa.ForeignKey("purchase_orders.number"), nullable=False, unique=True),
    sa.Column("lines", sa.String(32), nullable=False),
    sa.Column("line_group", sa.String(32), nullable=False),
    sa.Column("total", sa.Integer, nullable=False),
)
DEMONSTRATIONS = sa.Table(
    "demonstrations",
    METADATA,
    sa.Column("invoice_id", sa.String(16), sa.ForeignKey("invoices.invoice_id"), primary_key=True),
    sa.Column("source", sa.String(16), primary_key=True),
    sa.Column("messages", sa.Text, nullable=False),
)


@dataclass(frozen=True)
class Invoice:
    """An invoice and the limit of the purchase order that it is on."""

    invoice_id: str
    po_number: str
    lines: tuple[tuple[int, int], ...]
    """(quantity, unit price) per line."""
    spending_limit: int

    @cached_property
    def total(self) -> int:
        """Sum of quantity × unit price."""
        return sum(quantity * price for quantity, price in self.lines)

    @property
    def lines_text(self) -> str:
        """The lines as the prompt shows them: ``3x45; 7x23``."""
        return "; ".join(f"{quantity}x{price}" for quantity, price in self.lines)

    @property
    def line_group(self) -> str:
        """The lines in a fixed order: the same for invoices that differ only in the order of their lines."""
        return "; ".join(sorted(self.lines_text.split("; ")))

    @property
    def answer(self) -> str:
        """The right answer: ``APPROVE 296`` or ``REJECT 296``."""
        return f"{'APPROVE' if self.total <= self.spending_limit else 'REJECT'} {self.total}"


def generate(count: int = INVOICES, seed: int = SEED) -> list[Invoice]:
    """``count`` invoices, each on a purchase order of its own; about half are within the limit.

    The limit is ``total + d`` or ``total - 1 - d`` with d uniform in 0…max(20, total / 2), and at least 10.
    """
    rng = random.Random(seed)
    invoices = []
    for index, number in enumerate(rng.sample(range(10_000), count)):
        lines = tuple((rng.randint(2, 9), rng.randint(11, 99)) for _ in range(rng.randint(1, 2)))
        total = sum(quantity * price for quantity, price in lines)
        distance = rng.randint(0, max(20, total // 2))
        limit = total + distance if rng.random() < 0.5 else total - 1 - distance
        invoices.append(Invoice(f"inv-{index:05d}", f"{number:04d}", lines, max(10, limit)))
    return invoices


def task_rows(invoices: list[Invoice]) -> Iterator[dict[str, Any]]:
    """One row per invoice, joined with its purchase order, as the contract's table ``invoices`` has them."""
    for invoice in invoices:
        yield {
            "invoice_id": invoice.invoice_id,
            "po_number": invoice.po_number,
            "lines": invoice.lines_text,
            "line_group": invoice.line_group,
            "total": invoice.total,
            "po_limit": invoice.spending_limit,
        }


def demonstration_rows(invoices: list[Invoice]) -> Iterator[dict[str, Any]]:
    """Two rows for each of the first ``DEMONSTRATED`` invoices: the careful clerk's work and the hasty one's."""
    for invoice in invoices[:DEMONSTRATED]:
        for source in ("careful", "hasty"):
            messages = [
                message.model_dump(mode="json", exclude_defaults=True) for message in demonstrate(invoice, source)
            ]
            yield {"invoice_id": invoice.invoice_id, "source": source, "messages": json.dumps(messages)}


def demonstrate(invoice: Invoice, source: str) -> list[Message]:
    """The messages of one clerk. The careful one asks for the remaining budget; the hasty one decides by eye."""
    expression = "+".join(f"{quantity}*{price}" for quantity, price in invoice.lines)
    messages = _turn(
        "look up the purchase order",
        "purchase_order",
        {"number": invoice.po_number},
        {"spending_limit": invoice.spending_limit},
    )
    messages += _turn("add the lines", "calculator", {"expression": expression}, {"value": invoice.total})
    if source == "careful":
        remaining = invoice.spending_limit - invoice.total
        messages += _turn("check the budget", "budget_check", {"amount": invoice.total}, {"remaining": remaining})
    return [*messages, Message(role="assistant", content=invoice.answer)]


def prepare(home: Path) -> None:
    """Write ``home/data/invoice_approval.db`` unless it is there; it appears whole or not at all."""
    target = home / "data" / "invoice_approval.db"
    if target.is_file() and _version(target) == SCHEMA_VERSION:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".invoice_approval.") as folder:
        partial = Path(folder) / target.name
        _write(partial, generate())
        partial.replace(target)


def _turn(thinking: str, tool: str, arguments: dict[str, Any], result: dict[str, Any]) -> list[Message]:
    call = ToolCall(name=tool, arguments=_compact(arguments))
    return [
        Message(role="assistant", thinking=thinking, tool_calls=(call,)),
        Message(role="tool", name=tool, content=_compact(result)),
    ]


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _write(path: Path, invoices: list[Invoice]) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    METADATA.create_all(engine)
    stored = [{**row, "spending_limit": row["po_limit"], "number": row["po_number"]} for row in task_rows(invoices)]
    with engine.begin() as connection:
        for table, rows in (
            (PURCHASE_ORDERS, stored),
            (INVOICE_TABLE, stored),
            (DEMONSTRATIONS, list(demonstration_rows(invoices))),
        ):
            names = table.columns.keys()
            connection.execute(table.insert(), [{name: row[name] for name in names} for row in rows])
        connection.execute(sa.text(f"PRAGMA user_version = {SCHEMA_VERSION}"))
    engine.dispose()


def _version(path: Path) -> int:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.DatabaseError:  # not a database: written by something else, or damaged
        return -1
