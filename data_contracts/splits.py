"""Deterministic splits that no task crosses: neither by content nor by group key."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.hashing import canonical_json

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def normalise(text: str) -> str:
    """``text`` as it counts for "the same": NFKC, case-folded, runs of white space as one blank."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def normalise_value(value: Any) -> Any:
    """A JSON value with every text in it normalised; ``3`` stays different from ``"3"``."""
    if isinstance(value, str):
        return normalise(value)
    if isinstance(value, dict):
        return {key: normalise_value(part) for key, part in value.items()}
    return [normalise_value(part) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Item:
    """What the split needs to know of a task."""

    content: str
    """Normalised prompt."""
    group: str
    """Normalised group key."""


def assign(items: Sequence[Item], dev: int, test: int, salt: str) -> list[Split]:
    """The split of each item.

    Items that share content or group, directly or through others, form one block. Blocks are ordered by a salted hash
    of what they hold; each goes to the first of test and dev which still has room for all of it, else to train. So the
    result depends on the set of items only, not on their order, and few items change side when some are added.

    Args:
        items: one per task.
        dev: most tasks in dev.
        test: most tasks in test.
        salt: draws another split.
    """
    blocks = _blocks(items)
    names = {root: _name([items[index] for index in members], salt) for root, members in blocks.items()}
    room = {"test": test, "dev": dev}
    result: list[Split] = ["train"] * len(items)
    for root in sorted(blocks, key=lambda root: names[root]):
        members = blocks[root]
        split: Split = "train"
        if len(members) <= room["test"]:
            split = "test"
        elif len(members) <= room["dev"]:
            split = "dev"
        if split != "train":
            room[split] -= len(members)
        for index in members:
            result[index] = split
    return result


def _name(members: Sequence[Item], salt: str) -> str:
    return min(
        hashlib.sha256(canonical_json([salt, item.group, item.content]).encode()).hexdigest() for item in members
    )


def _blocks(items: Sequence[Item]) -> dict[int, list[int]]:
    """Connected items: index of the first one → indexes of all (union-find with path halving)."""
    parent = list(range(len(items)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[tuple[str, str], int] = {}
    for index, item in enumerate(items):
        for key in (("content", item.content), ("group", item.group)):
            one, other = root(first.setdefault(key, index)), root(index)
            parent[max(one, other)] = min(one, other)
    blocks: dict[int, list[int]] = {}
    for index in range(len(items)):
        blocks.setdefault(root(index), []).append(index)
    return blocks
