from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_contracts.contract import DataContract

HEAD = """\
apiVersion: v3.1.0
kind: DataContract
id: test
version: 1.0.0
status: active
"""


def contract_text(*tables: dict[str, Any], servers: list[dict[str, Any]] | None = None) -> str:
    servers = servers or [{"server": "files", "type": "local", "path": "{table}.jsonl", "format": "jsonl"}]
    schema = [{"logicalType": "object", **table} for table in tables]
    return HEAD + f"servers: {json.dumps(servers)}\nschema: {json.dumps(schema)}\n"


def load(folder: Path, *tables: dict[str, Any], servers: list[dict[str, Any]] | None = None) -> DataContract:
    path = folder / "contract.yaml"
    path.write_text(contract_text(*tables, servers=servers), encoding="utf-8")
    return DataContract.load(path)


def column(name: str, kind: str = "string", **fields: Any) -> dict[str, Any]:
    return {"name": name, "logicalType": kind, **fields}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
