"""Checkpoints of a sharded model: every rank writes its own part, any number of ranks reads them again.

torch.distributed.checkpoint (DCP) writes and reshards; :class:`infra.compute.checkpoint.CheckpointStore` makes a
checkpoint appear whole or not at all, once all ranks have written theirs, and keeps the newest and the best.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed, nn, optim
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from infra.compute.checkpoint import CheckpointStore, StoredFile, not_written, read_state, stored_file, write_state
from infra.errors import CheckFailed

_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
Found = TypeVar("Found")


@dataclass(frozen=True)
class Loaded:
    """What was loaded besides weights and optimizer.

    ``own`` is what this rank had saved for itself (its random states); None if another number of ranks saved it.
    """

    step: int
    shared: dict[str, Any]
    own: dict[str, Any] | None


class ShardedCheckpoints:
    """The checkpoints of one run over many ranks: ``folder/step-00000900/`` with a part of each rank and a manifest.

    Every rank makes one and calls every method. Frozen weights are not saved: load them first, from where they came.
    The optimizer's settings and states are saved; schedules and samplers go into ``shared``.

    Args:
        folder: on a file system that all ranks share.
        keep: how many checkpoints stay, the best one included.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self._store = folder, CheckpointStore(folder, keep)
        # Of its own: while a save goes on in the background, training goes on using the others.
        self._group = distributed.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: optim.Optimizer,
        shared: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        best: bool = False,
        wait: bool = False,
    ) -> None:
        """Save in the background: weights and states are copied before this returns, so that training may go on.

        Args:
            shared: tensors and plain values that all ranks have alike; those of rank 0 are kept.
            own: tensors and plain values of this rank alone.
            best: the best checkpoint so far; it is kept until a later one is.
            wait: return only when it is on disk.

        Raises:
            CheckFailed: this save could not begin, or the one before failed; older checkpoints are untouched.
        """
        self.wait()
        rank = distributed.get_rank()
        partial = self._on_first_rank(lambda: self._store.begin(step), step)
        weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
        problem = None
        try:
            write_state(partial / f"rank-{rank}.pt", {"shared": shared or {}, "own": own or {}, "ranks": _ranks()})
        except OSError as error:
            problem = error.strerror or str(error)
        written = async_save(
            {"model": weights, "optimizer": states},
            storage_writer=FileSystemWriter(partial, sync_files=True),
            process_group=self._group,
        )
        assert isinstance(written, Future)  # no stager that copies in the background was asked for
        self._saving = self._thread.submit(self._publish, step, best, partial, written, problem)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when the save in the background has ended.

        Raises:
            CheckFailed: it failed; older checkpoints are untouched and nothing of it is left.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load(self, model: nn.Module, optimizer: optim.Optimizer) -> Loaded | None:
        """Put the newest sound checkpoint into model and optimizer; None when nothing was ever saved.

        Incomplete and damaged ones are skipped, with a log line each, and stay on disk. The ranks need not be as many
        as when it was saved, nor the mesh the same.

        Raises:
            CheckFailed: there are checkpoints, but none is sound.
        """
        self.wait()
        found = self._on_first_rank(lambda: self._store.newest_with(lambda path: path))
        if found is None:
            return None
        step, path = found
        weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
        state: dict[str, Any] = {"model": weights, "optimizer": states}
        load(state, checkpoint_id=path, process_group=self._group)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"], options=_OPTIONS
        )
        first = read_state(path / "rank-0.pt")
        mine = path / f"rank-{distributed.get_rank()}.pt"
        same = first["ranks"] == _ranks()
        return Loaded(step, first["shared"], read_state(mine)["own"] if same else None)

    def close(self) -> None:
        """Wait for the save in the background, then end its thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _publish(self, step: int, best: bool, partial: Path, written: Future[Any], problem: str | None) -> None:
        """In the background: every rank hashes what it wrote, rank 0 publishes."""
        rank, files = distributed.get_rank(), dict[str, StoredFile]()
        try:
            written.result()
            mine = [*partial.glob(f"rank-{rank}.pt"), *partial.glob(f"__{rank}_*")]
            files = {path.name: stored_file(path) for path in [*mine, *([partial / ".metadata"] if rank == 0 else [])]}
        except Exception as error:  # any rank's failure is everyone's
            problem = problem or _cause(error)
        results: list[Any] = [None] * _ranks()
        distributed.all_gather_object(results, (problem, files), group=self._group)
        problems = [found for found, _ in results if found is not None]
        if rank == 0 and problems:
            self._store.abandon(step)
        if problems:
            raise not_written(step, problems[0], partial)
        everything = {name: file for _, found in results for name, file in found.items()}
        self._on_first_rank(lambda: self._store.finish(step, best, everything), step)

    def _on_first_rank(self, action: Callable[[], Found], step: int | None = None) -> Found:
        """Rank 0 does it; all ranks get what it returned or raise what it raised."""
        outcome: list[Any] = [None, None]
        if distributed.get_rank() == 0:
            try:
                outcome[0] = action()
            except CheckFailed as error:
                outcome[1] = error
            except OSError as error:
                outcome[1] = not_written(step or 0, error.strerror or str(error), self.folder)
        distributed.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        found: Found = outcome[0]
        return found


def _ranks() -> int:
    return distributed.get_world_size()


def _cause(error: BaseException) -> str:
    """One line; DCP wraps what happened on each rank."""
    failures = getattr(error, "failures", None) or {}
    for inner, _ in failures.values():
        return _cause(inner)
    return (getattr(error, "strerror", None) or str(error)).splitlines()[-1]
