"""Which tasks a step trains on: every task once per epoch, in an order drawn anew for each."""

from __future__ import annotations

from typing import TypedDict

from infra.seeds import generator


class SamplerState(TypedDict):
    """What a resume needs."""

    position: int


class TaskSampler:
    """Draws task indices without replacement; an epoch's order comes from the seed and the epoch's number alone."""

    def __init__(self, tasks: int, seed: int) -> None:
        self.tasks, self.seed = tasks, seed
        self.position = 0
        """Tasks drawn since the beginning."""
        self._epoch, self._order = -1, list(range(tasks))

    def take(self, count: int) -> list[int]:
        """The next ``count`` tasks; at an epoch's end the next one begins."""
        taken = []
        for _ in range(count):
            epoch, at = divmod(self.position, self.tasks)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(self.tasks))
                generator(self.seed, "tasks", epoch).shuffle(self._order)
            taken.append(self._order[at])
            self.position += 1
        return taken

    def state_dict(self) -> SamplerState:
        """The position, as a plain number."""
        return {"position": self.position}

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue from :meth:`state_dict`."""
        self.position = state["position"]
