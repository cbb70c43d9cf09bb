"""The weights that are trained, and those made from them: served, averaged, reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infra.compute.adapters import adapter_state, add_adapters, base_only, load_adapter_state, merged_state
from infra.compute.attention.backends import require_sinks
from infra.compute.average import WeightAverage
from infra.compute.policy import LoadedPolicy
from infra.compute.routing import freeze_routers
from infra.compute.scores import Scores, score
from infra.errors import CheckFailed
from infra.inference.embedded.engine import EmbeddedEngine
from rl.config import RLConfig
from rl.critic import Critic
from rl.experience import Experience
from rl.objectives.config import PPO


class Learner:
    """Trained model, critic, optimizer, average and reference of one run, and the engine they are served by.

    Without adapters the engine decodes with the trained model itself. With adapters the model of ``policy`` stays
    plain and is given the merged weights at every :meth:`sync`.
    """

    def __init__(self, policy: LoadedPolicy, config: RLConfig, seed: int) -> None:
        self.config, self.served = config, policy.model
        require_sinks(policy.model)
        without_dropout(policy.model)
        policy.model.eval()
        self.adapted = config.lora is not None
        self.model: Any = policy.model
        if config.lora is not None:
            self.model = add_adapters(copy.deepcopy(policy.model), config.lora, seed)
        if config.freeze_router:
            freeze_routers(self.model)
        needs_reference = config.kl.measure or config.kl.coefficient > 0
        self.has_reference = needs_reference
        self._reference = frozen_copy(policy.model) if needs_reference and not self.adapted else None
        hidden = policy.model.get_output_embeddings().weight.shape[1] if isinstance(config.objective, PPO) else 0
        self.critic = Critic(hidden) if hidden else None
        self.optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self.named_parameters()],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
        )
        self.average = WeightAverage(self.model, config.average) if config.average else None
        self.engine = EmbeddedEngine(self.served)
        self.updates = 0
        """Optimizer updates made."""
        self.synced_updates = 0
        """Those that the engine's weights contain."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, the critic included."""
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        if self.critic is not None:
            named += [(f"critic.{name}", parameter) for name, parameter in self.critic.named_parameters()]
        return named

    def score(self, part: Experience, entropy: bool = False, values: bool = False) -> Scores:
        """Scores of the model being trained."""
        return self._score(self.model, part, entropy, values)

    @torch.no_grad()
    def frozen_scores(self, experience: Experience, values: bool = False) -> Scores:
        """Scores without gradient, in micro-batches."""
        return _joined([self.score(part, values=values) for part in self._parts(experience)], experience)

    @torch.no_grad()
    def reference_logprobs(self, experience: Experience) -> Tensor:
        """Log-probs of the policy at the start of the stage, ``[sequences, length - 1]``."""
        parts = []
        for part in self._parts(experience):
            if self._reference is not None:
                parts.append(self._score(self._reference, part))
            else:
                with base_only(self.model):
                    parts.append(self._score(self.model, part))
        return _joined(parts, experience).logprobs

    def step(self, rate: float) -> None:
        """One optimizer step at learning rate ``rate``."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates += 1
        if self.average is not None:
            self.average.update()

    def sync(self) -> None:
        """Give the engine the present weights.

        Raises:
            CheckFailed: the weights were updated and the engine's are still the old ones.
        """
        before = self.engine.checksum() if self.updates > self.synced_updates else None
        self._hand_over()
        self.synced_updates = self.updates
        if before is not None and self.engine.checksum() == before:
            raise CheckFailed(
                f"the weights were updated {self.updates} times and the engine still has the old ones",
                where="stage rl, weight sync",
                fix="raise rl.learning_rate if every update rounds to nothing; else the sync is broken",
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, model and engine hold the averaged weights (those of the last update without an average)."""
        if self.average is None:
            yield
            return
        try:
            with self.average.applied():
                self._hand_over()
                yield
        finally:
            self._hand_over()

    def served_state(self) -> dict[str, Tensor]:
        """A copy of the weights that the engine has, under the names of the plain model."""
        return {name: tensor.detach().clone() for name, tensor in self.served.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """Everything a resume needs."""
        return {
            "model": adapter_state(self.model) if self.adapted else self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "updates": self.updates,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`, bit for bit."""
        if self.adapted:
            load_adapter_state(self.model, state["model"])
        else:
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.updates = self.synced_updates = state["updates"]
        self._hand_over()

    def _hand_over(self) -> None:
        if self.adapted:
            self.served.load_state_dict(merged_state(self.model))
        self.engine.sync()

    def _score(self, model: Any, part: Experience, entropy: bool = False, values: bool = False) -> Scores:
        critic = self.critic if values else None
        return score(
            model, part.prompts, part.completions, part.batch, self.config.temperature, entropy=entropy, critic=critic
        )

    def _parts(self, experience: Experience) -> Iterator[Experience]:
        for start in range(0, experience.count, self.config.microbatch):
            yield experience.rows(range(start, min(start + self.config.microbatch, experience.count)))


def without_dropout(model: nn.Module) -> None:
    """Switch all dropout off for good: in RL old and new log-probs must come from one policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(module.__dict__.get(name), float):
                module.__dict__[name] = 0.0


def frozen_copy(model: Any) -> Any:
    """A copy in eval mode that takes no gradient and follows no later change."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def _joined(parts: list[Scores], experience: Experience) -> Scores:
    """Rows of the parts one below the other, padded to the width of the whole."""
    width = experience.batch.mask.shape[1]

    def join(columns: list[Tensor]) -> Tensor:
        return torch.cat([nn.functional.pad(column, (0, width - column.shape[1])) for column in columns])

    values = [part.values for part in parts if part.values is not None]
    return Scores(join([part.logprobs for part in parts]), values=join(values) if values else None)
