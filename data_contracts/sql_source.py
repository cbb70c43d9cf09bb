"""Rows from any database that SQLAlchemy can reach: a table, a view, or a query."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from data_contracts.contract import Table
from infra.errors import UsageError
from infra.yaml_file import did_you_mean

BIND = re.compile(r"(?<![:\w\\]):(?=\w)")


def read_sql(location: str, table: Table, base: Path) -> list[dict[str, Any]]:
    """Rows of ``table``: its query's, or the declared columns of the table or view with its physical name.

    Whatever the query does is rolled back. Passwords never appear in messages.

    Raises:
        UsageError: a bad URL, a missing driver, file, table or column, no connection, or a query that fails.
    """
    url = _url(location, base)
    where = url.render_as_string(hide_password=True)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    try:
        with engine.connect() as connection:
            return _rows(connection, table, where)
    except SQLAlchemyError as error:
        cause = error.__cause__ or error
        raise UsageError(
            f"table {table.name!r} cannot be read: {str(cause).strip().splitlines()[0]}",
            where=where,
            fix="correct the server's location or the table's query, or start the database",
        ) from None
    finally:
        engine.dispose()


def _url(location: str, base: Path) -> sa.URL:
    try:
        url = sa.make_url(location)
        url.get_dialect()
    except NoSuchModuleError:
        name = location.partition(":")[0]
        fix = "name an installed driver, e.g. sqlite:/// or postgresql+psycopg://"
        raise UsageError(f"there is no database driver {name!r}", where=name, fix=fix) from None
    except (ArgumentError, ImportError, ValueError) as error:
        scheme = location.partition("://")[0]
        reason = f": {error}" if isinstance(error, ImportError) else ""  # other messages may quote the password
        fix = "write dialect+driver://user:password@host/database, with an installed driver"
        raise UsageError(f"the {scheme} location cannot be used{reason}", where=f"{scheme}://…", fix=fix) from None
    if url.get_backend_name() == "sqlite":
        name = url.database or ""
        path = base / name  # an absolute name stays as it is
        if name in ("", ":memory:") or not path.is_file():
            fix = "create it first (a domain's `prepare` does), or correct the location"
            raise UsageError("the SQLite database does not exist", where=str(path), fix=fix)
        return url.set(database=str(path))
    return url


def _rows(connection: sa.Connection, table: Table, where: str) -> list[dict[str, Any]]:
    if table.query is not None:
        result = connection.execute(sa.text(BIND.sub(r"\\:", table.query)))
        if not result.returns_rows:
            raise UsageError(f"the query of table {table.name!r} gives no rows", where=where, fix="write a SELECT")
    else:
        result = connection.execute(_select(connection, table, where))
    names = list(result.keys())
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        fix = "rename with AS"
        raise UsageError(f"the query of table {table.name!r} repeats {', '.join(repeated)}", where=where, fix=fix)
    return [dict(zip(names, row, strict=True)) for row in result]


def _select(connection: sa.Connection, table: Table, where: str) -> sa.Select[Any]:
    inspector = sa.inspect(connection)
    schema, _, name = table.physical_name.rpartition(".")
    if not inspector.has_table(name, schema=schema or None):
        present = inspector.get_table_names(schema=schema or None) + inspector.get_view_names(schema=schema or None)
        raise UsageError(
            f"the database has no table {table.physical_name!r}{did_you_mean(name, present)}",
            where=where,
            fix=f"tables there: {', '.join(present) or 'none'}; set physicalName, or create the table",
        )
    present_columns = {column["name"] for column in inspector.get_columns(name, schema=schema or None)}
    declared = [column for column in table.columns.values() if column.physical_name in present_columns]
    if not declared:
        fix = f"columns there: {', '.join(sorted(present_columns))}"
        raise UsageError(f"table {table.physical_name!r} has none of the contract's columns", where=where, fix=fix)
    source = sa.table(name, schema=schema or None)
    order: list[sa.ColumnClause[Any]] = [sa.column(table.columns[key].physical_name) for key in table.primary_key]
    known = [column for column in order if column.name in present_columns]
    columns: list[sa.ColumnClause[Any]] = [sa.column(column.physical_name) for column in declared]
    return sa.select(*columns).select_from(source).order_by(*known)
