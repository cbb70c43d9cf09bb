from __future__ import annotations

import csv
import json
import sqlite3
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
import sqlalchemy as sa

from data_contracts.contract import DataContract
from data_contracts.sources import Rows, read_table
from data_contracts.values import native_value, text_value
from infra.errors import UsageError
from tests.data_contracts.samples import column, load

PYTHON = [{"server": "code", "type": "custom", "location": "python://rows.py:{table}"}]


def csv_contract(folder: Path, *columns: dict, **server: str) -> DataContract:
    servers: list[dict] = [{"server": "files", "type": "local", "path": "{table}.csv", "format": "csv"}]
    servers[0]["customProperties"] = [{"property": name, "value": value} for name, value in server.items()]
    return load(folder, {"name": "t", "properties": list(columns)}, servers=servers)


def sql_contract(folder: Path, *tables: dict, location: str = "sqlite:///${SENMON_HOME}/x.db") -> DataContract:
    return load(folder, *tables, servers=[{"server": "db", "type": "custom", "location": location}])


@pytest.fixture
def database(tmp_path):
    connection = sqlite3.connect(tmp_path / "x.db")
    connection.execute("CREATE TABLE invoices (id TEXT, total INTEGER, paid INTEGER, extra TEXT, meta TEXT)")
    connection.execute(
        """INSERT INTO invoices VALUES ('00417', 5, 1, 'x', '{"a": [1]}'), ('00007', 6, 0, 'y', '{"a":1,"a":2}')"""
    )
    connection.execute("CREATE VIEW big AS SELECT id, total FROM invoices WHERE total > 5")
    connection.commit()
    connection.close()
    return tmp_path


def test_csv_text_na_null_none_is_text(tmp_path):  # DC-06
    (tmp_path / "t.csv").write_text("code,label\nNA,1\nNL,0\nnull,1\n,0\n")
    contract = csv_contract(tmp_path, column("code"), column("label", "integer"))
    rows = read_table(contract, "t", tmp_path, {})
    assert [row["code"] for row in rows] == ["NA", "NL", "null", None]
    assert [row["label"] for row in rows] == [1, 0, 1, 0]
    assert rows.positions == [2, 3, 4, 5]


@pytest.mark.parametrize("format_", ["csv", "jsonl"])
def test_identifiers_keep_their_zeros(tmp_path, format_):  # DC-07
    if format_ == "csv":
        text = 'customer_id\n00417\n1002\n""\n'
        contract = csv_contract(tmp_path, column("customer_id"))
    else:
        text = '{"customer_id": "00417"}\n{"customer_id": "1002"}\n{"customer_id": null}\n'
        contract = load(tmp_path, {"name": "t", "properties": [column("customer_id")]})
    path = tmp_path / f"t.{format_}"
    path.write_text(text)
    rows = read_table(contract, "t", tmp_path, {})
    assert [row["customer_id"] for row in rows] == ["00417", "1002", None]
    if format_ == "csv":
        again = tmp_path / "again.csv"
        with again.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["customer_id"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        assert again.read_bytes() == path.read_bytes()


def test_text_is_read_as_its_declared_type_or_left_alone():
    assert text_value("4", "integer") == 4
    assert text_value("007", "integer") == "007"
    assert text_value("4.0", "integer") == "4.0"
    assert text_value("1e999", "number") == "1e999"
    assert text_value("nan", "number") == "nan"
    assert text_value("2.50", "number") == 2.5
    assert text_value("true", "boolean") is True
    assert text_value("True", "boolean") == "True"
    assert text_value("12", "string") == "12"
    assert text_value('{"a":1,"a":2}', "object") == '{"a":1,"a":2}'


def test_exact_decimals_and_dates():
    assert native_value(Decimal("12.50"), "number") == 12.5
    assert type(native_value(Decimal("3.00"), "integer")) is int
    assert native_value(Decimal("0.1234567890123456789"), "number") == Decimal("0.1234567890123456789")
    assert native_value(date(2026, 1, 2), "date") == "2026-01-02"
    assert native_value(1, "boolean") == 1
    assert native_value(1, "boolean") is not True


def test_jsonl_rejects_only_broken_lines(tmp_path):  # DC-11
    lines = [
        '{"id":1,"meta":{}}',
        '{"id":2,"meta":{"x":{"answer":"7","answer":"8"}}}',
        "",
        '{"id":3,"meta":{}}',
        "[1]",
        "{",
    ]
    (tmp_path / "t.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"id": "\xff"}\n')
    contract = load(tmp_path, {"name": "t", "properties": [column("id", "integer"), column("meta", "object")]})
    rows = read_table(contract, "t", tmp_path, {})
    assert [row["id"] for row in rows] == [1, 3]
    assert rows.positions == [1, 4]
    assert [(failure.row, failure.rule.split(" (")[0]) for failure in rows.rejected] == [
        (2, "duplicate key 'answer'"),
        (5, "not a JSON object"),
        (6, "not JSON: Expecting property name enclosed in double quotes"),
        (7, "not UTF-8"),
    ]


def test_line_separators_inside_text_do_not_end_a_line(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"a": "one\u2028two\u0085"}, ensure_ascii=False) + "\r\n", "utf-8")
    contract = load(tmp_path, {"name": "t", "properties": [column("a")]})
    assert list(read_table(contract, "t", tmp_path, {})) == [{"a": "one\u2028two\u0085"}]


def test_csv_wrong_number_of_cells_and_multi_line_cells(tmp_path):
    (tmp_path / "t.csv").write_bytes(b'\xef\xbb\xbfa;b\n"x\ny";1\n1;2;3\nz;2\n')
    contract = csv_contract(tmp_path, column("a"), column("b", "integer"), delimiter=";")
    rows = read_table(contract, "t", tmp_path, {})
    assert list(rows) == [{"a": "x\ny", "b": 1}, {"a": "z", "b": 2}]
    assert rows.positions == [2, 5]
    assert [(failure.row, failure.rule) for failure in rows.rejected] == [(4, "3 cells under 2 column names")]


@pytest.mark.parametrize(
    ("content", "words"), [(b"a,a\n1,2\n", "repeated"), (b'a,b\n"x', "not valid CSV"), (b"a\n\xff\n", "text")]
)
def test_broken_csv(tmp_path, content, words):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_table(csv_contract(tmp_path, column("a")), "t", tmp_path, {})


def test_missing_file_names_the_near_one(tmp_path):
    (tmp_path / "t.jsonI").write_text("{}")
    contract = load(tmp_path, {"name": "t", "properties": [column("a")]})
    with pytest.raises(UsageError, match=r"did you mean 't\.jsonI'") as caught:
        read_table(contract, "t", tmp_path, {})
    assert caught.value.where == str(tmp_path / "t.jsonl")


def test_parquet_gives_what_was_written(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "calls": [{"name": "lookup"}]}]
    table = pa.table({"id": ["00417", "1"], "day": [date(2026, 1, 2), None], "messages": [messages, []]})
    pq.write_table(table, tmp_path / "t.parquet")
    servers = [{"server": "files", "type": "local", "path": "t.parquet", "format": "parquet"}]
    properties = [column("id"), column("day", "date"), column("messages", "array")]
    contract = load(tmp_path, {"name": "t", "properties": properties}, servers=servers)
    assert list(read_table(contract, "t", tmp_path, {})) == [
        {"id": "00417", "day": "2026-01-02", "messages": messages},
        {"id": "1", "day": None, "messages": []},
    ]
    (tmp_path / "t.parquet").write_bytes(b"no parquet")
    with pytest.raises(UsageError, match="not a Parquet file"):
        read_table(contract, "t", tmp_path, {})


def test_sql_table_reads_the_declared_columns(database):
    properties = [
        column("id", primaryKey=True),
        column("total", "integer"),
        column("paid", "boolean"),
        column("meta", "object"),
    ]
    contract = sql_contract(database, {"name": "bills", "physicalName": "invoices", "properties": properties})
    assert list(read_table(contract, "bills", database, {"SENMON_HOME": str(database)})) == [
        {"id": "00007", "total": 6, "paid": False, "meta": '{"a":1,"a":2}'},
        {"id": "00417", "total": 5, "paid": True, "meta": {"a": [1]}},
    ]


def test_sql_view_query_colons_and_physical_names(database):
    variables = {"SENMON_HOME": str(database)}
    view = {"name": "big", "properties": [{**column("key"), "physicalName": "id"}]}
    assert list(read_table(sql_contract(database, view), "big", database, variables)) == [{"key": "00007"}]
    query = "SELECT id AS a, '12:30 :x' AS b FROM invoices WHERE total = 5"
    table = {"name": "q", "properties": [column("a")], "customProperties": [{"property": "query", "value": query}]}
    assert list(read_table(sql_contract(database, table), "q", database, variables)) == [
        {"a": "00417", "b": "12:30 :x"}
    ]


def test_sql_queries_change_nothing(database):
    change = [{"property": "query", "value": "DELETE FROM invoices RETURNING id"}]
    contract = sql_contract(database, {"name": "q", "properties": [column("id")], "customProperties": change})
    assert len(read_table(contract, "q", database, {"SENMON_HOME": str(database)})) == 2
    engine = sa.create_engine(f"sqlite:///{database}/x.db")
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM invoices")).scalar() == 2
    engine.dispose()


def test_sql_errors(database):
    variables = {"SENMON_HOME": str(database)}
    table = {"name": "invoice", "properties": [column("id")]}
    with pytest.raises(UsageError, match="no table 'invoice', did you mean 'invoices'") as caught:
        read_table(sql_contract(database, table), "invoice", database, variables)
    assert "invoices" in caught.value.fix
    bad = {**table, "customProperties": [{"property": "query", "value": "SELECT missing FROM invoices"}]}
    with pytest.raises(UsageError, match="no such column"):
        read_table(sql_contract(database, bad), "invoice", database, variables)
    twice = {**table, "customProperties": [{"property": "query", "value": "SELECT id, id FROM invoices"}]}
    with pytest.raises(UsageError, match="repeats id"):
        read_table(sql_contract(database, twice), "invoice", database, variables)
    with pytest.raises(UsageError, match="does not exist"):
        read_table(sql_contract(database, table, location="sqlite:///none.db"), "invoice", database, {})
    assert not (database / "none.db").exists()


def test_variables(database, monkeypatch):
    contract = sql_contract(
        database, {"name": "invoices", "properties": [column("id")]}, location="sqlite:///${SOME_HOME}/x.db"
    )
    with pytest.raises(UsageError, match="'SOME_HOME' is not set"):
        read_table(contract, "invoices", database, {})
    monkeypatch.setenv("SOME_HOME", str(database))
    assert len(read_table(contract, "invoices", database, {})) == 2


@pytest.mark.parametrize(
    "location",
    [
        "postgresql+psycopg://u:s3cret@127.0.0.1:1/d",
        "nodb://u:s3cret@host/d",
        "sqlite+nodriver://u:s3cret@host/d",
        "postgresql+psycopg://u:s3cret@host:port/d",
    ],
)
def test_passwords_are_never_shown(tmp_path, location):
    contract = sql_contract(tmp_path, {"name": "t", "properties": [column("id")]}, location=location)
    with pytest.raises(UsageError) as caught:
        read_table(contract, "t", tmp_path, {})
    assert "s3cret" not in str(caught.value)


def test_python_function_gets_the_variables(tmp_path):
    (tmp_path / "rows.py").write_text(
        "def t(variables):\n    yield {'a': variables['X'], 'm': (1,)}\n    yield {'a': 3}\n"
    )
    contract = load(tmp_path, {"name": "t", "properties": [column("a")]}, servers=PYTHON)
    rows = read_table(contract, "t", tmp_path, {"X": "y"})
    assert isinstance(rows, Rows)
    assert list(rows) == [{"a": "y", "m": (1,)}, {"a": 3}]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def u(v): return []", "no function 't'"),
        ("def t(v):\n    raise KeyError('gone')", "raised KeyError"),
        ("def t(v): return [3]", "row 1 from t() is no dict"),
        ("def t(v): return [{1: 2}]", "row 1 from t() is no dict"),
        ("def t(v: return", "fails on import"),
        ("\nimport nothing_like_it", "fails on import"),
        ("\nraise SystemExit(0)", "fails on import"),
    ],
)
def test_python_errors(tmp_path, code, words):
    (tmp_path / "rows.py").write_text(code)
    contract = load(tmp_path, {"name": "t", "properties": [column("a")]}, servers=PYTHON)
    with pytest.raises(UsageError) as caught:
        read_table(contract, "t", tmp_path, {})
    assert words in caught.value.what
    assert caught.value.where.startswith(str(tmp_path / "rows.py"))
    if code.startswith("\n"):
        assert caught.value.where.endswith(":2")


@pytest.mark.parametrize("reference", ["../outside.py:t", "link.py:t", "{outside}:t"])
def test_code_outside_the_domain_folder_is_not_run(tmp_path, reference):
    folder = tmp_path / "domain"
    folder.mkdir()
    outside = tmp_path / "outside.py"
    outside.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef t(v): return []\n")
    (folder / "link.py").symlink_to(outside)
    servers = [{"server": "code", "type": "custom", "location": f"python://{reference.format(outside=outside)}"}]
    contract = load(folder, {"name": "t", "properties": [column("a")]}, servers=servers)
    with pytest.raises(UsageError, match="outside the domain folder"):
        read_table(contract, "t", folder, {})
    assert not (tmp_path / "ran").exists()


def test_a_json_file_is_data_never_code(tmp_path):
    servers = [{"server": "code", "type": "custom", "location": "python://rows.txt:t"}]
    contract = load(tmp_path, {"name": "t", "properties": [column("a")]}, servers=servers)
    with pytest.raises(UsageError, match="cannot read the location"):
        read_table(contract, "t", tmp_path, {})
