"""Checkpoints: whole or not at all, newest by step, rotation that keeps the newest and the best."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.compute.checkpoint import CheckpointStore, load_checkpoint, save_checkpoint
from infra.errors import CheckFailed


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((64, 64), float(step)), "names": ["a", "b"], "nested": {"lr": 0.1}}


def directories(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest_step(store: CheckpointStore) -> int:
    found = store.newest()
    assert found is not None
    step, state = found
    assert state["step"] == step
    assert torch.equal(state["weight"], state_of(step)["weight"])
    return step


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """The kernel refuses to write files any longer, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_saved_comes_back_random_states_included(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "folder")
    assert store.newest() is None
    assert store.steps() == []
    state = {**state_of(3), "python": random.getstate(), "torch": torch.get_rng_state()}
    expected = random.random(), torch.rand(3)
    assert store.save(3, state) == tmp_path / "new" / "folder" / "step-00000003"
    found = store.newest()
    assert found is not None
    random.setstate(found[1]["python"])
    torch.set_rng_state(found[1]["torch"])
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])
    assert directories(store.folder / "step-00000003") == ["manifest.json", "state.pt"]


@pytest.mark.parametrize("marker", [False, True])
def test_ck_01_a_half_written_checkpoint_is_not_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, marker: bool
) -> None:
    """CK-01: step 20 cut to half, without its marker, or with it: step 10 is resumed, step 20 is named and stays."""
    store = CheckpointStore(tmp_path)
    store.save(10, state_of(10))
    broken = store.save(20, state_of(20))
    content = (broken / "state.pt").read_bytes()
    (broken / "state.pt").write_bytes(content[: len(content) // 2])
    if not marker:
        (broken / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, "senmon"):
        assert newest_step(store) == 10
    reason = f"state.pt is {len(content) // 2} bytes, {len(content)} bytes were written" if marker else "incomplete"
    assert str(broken) in caplog.text
    assert reason in caplog.text
    assert broken.is_dir()
    assert store.steps() == [10]


def test_ck_01_a_changed_byte_is_found_by_its_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CK-01: same size, other content."""
    store = CheckpointStore(tmp_path)
    store.save(10, state_of(10))
    broken = store.save(20, state_of(20)) / "state.pt"
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    with caplog.at_level(logging.WARNING, "senmon"):
        assert newest_step(store) == 10
    assert "the content of state.pt has changed" in caplog.text


def test_ck_01_a_save_that_is_killed_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """CK-01 with a real process that dies while the state is on disk and the manifest is not."""
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom infra.compute import checkpoint\n"
        "store = checkpoint.CheckpointStore(Path(sys.argv[1]))\nstore.save(10, {'step': 10})\n"
        "checkpoint.file_hash = lambda path: os._exit(9)\nstore.save(20, {'step': 20})\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == 9
    assert directories(tmp_path) == ["step-00000010", "step-00000020.partial"]
    store = CheckpointStore(tmp_path)
    assert store.newest() == (10, {"step": 10})
    store.save(30, {"step": 30})
    assert directories(tmp_path) == ["step-00000010", "step-00000030"], "the next save cleans up"


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        (store.save(step, state_of(step)) / "state.pt").write_bytes(b"")
    with pytest.raises(CheckFailed, match=r"step-00000002 is damaged.*step-00000001 is damaged") as error:
        store.newest()
    assert error.value.where == str(tmp_path)
    assert error.value.fix


def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"step": 1})
    store.save(2, {"step": 2, "path": Path("x")})
    assert store.newest() == (1, {"step": 1})


@pytest.mark.parametrize("keep", [1, 2])
def test_ck_12_rotation_keeps_the_newest_and_the_best(tmp_path: Path, keep: int) -> None:
    """CK-12: steps 900 (best), 1000, 1100 with shuffled times; the best and the newest stay, by step number."""
    store = CheckpointStore(tmp_path, keep)
    for step, best, age in ((900, True, 1), (1000, False, 3), (1100, False, 2)):
        path = store.save(step, state_of(step), best)
        for file in (path, *path.iterdir()):
            os.utime(file, (1e9 + age, 1e9 + age))
    assert store.steps() == [900, 1100]
    assert directories(tmp_path) == ["step-00000900", "step-00001100"]
    assert newest_step(CheckpointStore(tmp_path)) == 1100


def test_ck_12_newest_is_by_number_where_names_and_times_say_otherwise(tmp_path: Path) -> None:
    """CK-12: more digits than the name's padding, written first."""
    store = CheckpointStore(tmp_path)
    store.save(1_000_000_000, state_of(1_000_000_000))
    store.save(999_999_999, state_of(999_999_999))
    assert newest_step(store) == 1_000_000_000


def test_a_later_best_frees_the_earlier_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, state_of(1), best=True)
    store.save(2, state_of(2), best=True)
    store.save(3, state_of(3))
    assert store.steps() == [2, 3]


def test_ck_12_rotation_waits_for_the_new_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CK-12: when the new checkpoint is renamed into place, the old ones are all still there."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, state_of(1))
    seen: list[list[str]] = []
    removed = shutil.rmtree

    def watch(path: Any, **options: Any) -> None:
        seen.append(directories(tmp_path))
        removed(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watch)
    store.save(2, state_of(2))
    assert seen
    assert all("step-00000002" in names for names in seen)
    assert directories(tmp_path) == ["step-00000002"]


def test_a_disk_without_room_costs_nothing_but_the_new_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, state_of(1))
    with files_limited_to(8192), pytest.raises(CheckFailed, match="step 2 could not be written") as error:
        store.save(2, state_of(2))
    assert "older checkpoints are intact" in error.value.fix
    assert directories(tmp_path) == ["step-00000001"]
    assert newest_step(store) == 1


@pytest.mark.parametrize("call", range(4))
def test_whatever_flush_fails_for_want_of_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """File systems that allocate late report ENOSPC at the flush: of the state, the manifest, either directory."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, state_of(1))
    calls = []

    def flush(handle: int) -> None:
        calls.append(handle)
        if len(calls) == call + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", flush)
    with pytest.raises(CheckFailed, match="No space left on device"):
        store.save(2, state_of(2))
    assert "step-00000001" in directories(tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    assert newest_step(store) == (2 if call == 3 else 1), "the last flush comes after the rename"


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(5, {"step": 5, "value": 1})
    store.save(5, {"step": 5, "value": 2}, best=True)
    assert store.newest() == (5, {"step": 5, "value": 2})
    assert directories(tmp_path) == ["step-00000005"]


def test_a_crash_while_a_step_is_replaced_leaves_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(5, state_of(5)).rename(tmp_path / "step-00000005.replaced")
    assert newest_step(store) == 5
    assert store.steps() == [5]
    store.save(6, state_of(6))
    assert store.steps() == [6]
    assert directories(tmp_path) == ["step-00000006"]


def test_after_a_fallback_the_damaged_one_neither_counts_nor_goes_until_it_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(10, state_of(10))
    broken = store.save(30, state_of(30)) / "state.pt"
    broken.write_bytes(bytes(len(broken.read_bytes())))
    assert newest_step(store) == 10
    store.save(20, state_of(20))
    assert directories(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    assert newest_step(store) == 20
    with caplog.at_level(logging.WARNING, "senmon"):
        caplog.clear()
        store.save(30, state_of(30))
    assert "step-00000030 was damaged and is replaced" in caplog.text
    assert newest_step(store) == 30
    assert store.steps() == [20, 30]


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 half a zip"])
def test_a_damaged_single_file_is_an_error_with_a_fix(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stage" / "checkpoint.pt"
    assert load_checkpoint(path) is None
    save_checkpoint(path, {"step": 4})
    assert load_checkpoint(path) == {"step": 4}
    assert directories(path.parent) == ["checkpoint.pt"]
    path.write_bytes(content)
    with pytest.raises(CheckFailed, match="the checkpoint is damaged") as error:
        load_checkpoint(path)
    assert error.value.where == str(path)
