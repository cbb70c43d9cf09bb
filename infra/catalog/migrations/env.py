"""Alembic's entry: runs the migrations on the connection, and inside the transaction, of the caller."""

from __future__ import annotations

from alembic import context

from infra.catalog.tables import METADATA

# The caller has begun a transaction: an interrupted upgrade leaves the old schema, whole, on SQLite too.
context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
