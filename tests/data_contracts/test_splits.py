from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.splits import Item, assign, normalise, normalise_value


def test_normalise():
    assert normalise("  Reset\u00a0 PIN\n") == normalise("reset pin") == normalise("ＲＥＳＥＴ pin") == "reset pin"
    assert normalise("Straße") == normalise("STRASSE")
    assert normalise("pin 1") != normalise("pin 2")
    assert normalise_value({"a": ["X  y", 3]}) == {"a": ["x y", 3]}
    assert normalise_value(3) != normalise_value("3")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=40),
    st.integers(0, 15),
    st.integers(0, 15),
    st.text(max_size=3),
)
def test_no_content_and_no_group_is_in_two_splits(pairs, dev, test, salt):
    items = [Item(f"content {content}", f"group {group}") for content, group in pairs]
    splits = assign(items, dev, test, salt)
    for part in ("content", "group"):
        sides: dict[str, set[str]] = {}
        for item, split in zip(items, splits, strict=True):
            sides.setdefault(item.content if part == "content" else item.group, set()).add(split)
        assert all(len(side) == 1 for side in sides.values())
    counts = Counter(splits)
    assert counts["dev"] <= dev
    assert counts["test"] <= test
    order = list(range(len(items)))
    random.Random(0).shuffle(order)
    shuffled = assign([items[index] for index in order], dev, test, salt)
    assert shuffled == [splits[index] for index in order]


def test_exact_sizes_other_salts_and_stability():
    items = [Item(str(i), str(i)) for i in range(1000)]
    splits = assign(items, 50, 100, "")
    assert Counter(splits) == {"train": 850, "dev": 50, "test": 100}
    assert assign(items, 50, 100, "other") != splits
    more = assign([*items, *(Item(f"new {i}", f"new {i}") for i in range(20))], 50, 100, "")
    kept = sum(old == new == "test" for old, new in zip(splits, more, strict=False))
    assert kept >= 90


def test_a_chain_of_shared_keys_is_one_block():
    items = [Item("a", "1"), Item("b", "1"), Item("b", "2"), Item("c", "2"), Item("z", "9")]
    splits = assign(items, 0, 2, "")
    assert len(set(splits[:4])) == 1
    assert splits[:4] == ["train"] * 4
    assert splits[4] == "test"
