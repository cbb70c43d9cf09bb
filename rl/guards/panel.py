"""The guards together: fed with a step's figures, they say what to do about it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

from rl.guards.alarm import SEVERITY, SHOWN, Alarm
from rl.guards.config import GuardConfig
from rl.guards.history import History
from rl.guards.rules import GRADIENT, GRADIENT_FIX, RULES, Finding, spike

NON_FINITE_FIX = "lower rl.learning_rate; look for empty means, overflow in half precision and damaged weights"


class GuardPanel:
    """All guards of a run.

    With several ranks, feed every rank the same global figures: all then act alike.
    Its state is plain values: save :meth:`state_dict` with the checkpoint, and a resumed run gets the same alarms.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._history = History(config.start_steps)
        self._told: dict[str, int] = {}
        self._step = -1
        self._skips = 0
        self._parameters_checked = False
        self.learning_rate_scale = 1.0
        """What to multiply the scheduled learning rate with; ``lower_lr`` shrinks it."""

    def observe(self, step: int, figures: Mapping[str, float | None]) -> tuple[Alarm, ...]:
        """The alarms of a finished step, most severe first; none is said twice within ``repeat_after`` steps.

        Args:
            step: larger than at the last call.
            figures: None = undefined at this step, the same as absent.

        Raises:
            ValueError: ``step`` does not rise.
        """
        if step <= self._step:
            raise ValueError(f"step {step} follows step {self._step}")
        self._step = step
        self._history.add(figures)
        alarms = [
            self._alarm(name, step, finding)
            for name, rule in RULES.items()
            for finding in rule(self._history, self.config)
        ]
        alarms += self._non_finite(step, figures)
        return _ordered(alarm for alarm in alarms if not alarm.quiet)

    def before_update(self, step: int, gradient_norm: float, figures: Mapping[str, float | None]) -> tuple[Alarm, ...]:
        """Whether to make an update: call it after backward (norm before clipping), before the optimizer.

        Drop the update when an alarm asks to ``skip_step``; a quiet one is not worth a log line. After
        ``max_skips`` skipped in a row comes a ``stop``.

        Args:
            figures: of this update alone (its loss, …); looked at for NaN and infinity.
        """
        alarms = self._non_finite(step, {GRADIENT: gradient_norm, **figures})
        action = self.config.gradient.action
        if not alarms and action != "off":
            what = spike(self._history.last(GRADIENT, self.config.gradient.window), gradient_norm, self.config)
            if what is not None:
                finding = Finding(action, GRADIENT, what, GRADIENT_FIX)
                alarms.append(self._alarm("gradient", step, finding, latest=gradient_norm))
        skip = next((alarm for alarm in alarms if alarm.action == "skip_step"), None)
        self._skips = 0 if skip is None else self._skips + 1
        if skip is not None and self._skips >= self.config.max_skips:
            what = f"{self._skips} updates in a row were skipped, the last because {skip.what}"
            alarms.append(self._alarm(skip.guard, step, Finding("stop", skip.figure, what, skip.fix)))
        return _ordered(alarm for alarm in alarms if alarm.action == "skip_step" or not alarm.quiet)

    def parameters_due(self, updates: int) -> bool:
        """Whether it is time to look at the parameters, after so many optimizer updates in this run."""
        guard = self.config.parameters
        return guard.action != "off" and not self._parameters_checked and updates >= guard.updates

    def observe_parameters(self, step: int, updates: int, unmoved: Mapping[str, bool]) -> tuple[Alarm, ...]:
        """The alarm about parameters that never moved.

        Args:
            unmoved: their names, and whether they ever got a gradient (``ParameterWatch.unmoved``).
        """
        self._parameters_checked = True
        guard = self.config.parameters
        names = [name for name in unmoved if not any(fnmatch.fnmatchcase(name, pattern) for pattern in guard.may_stay)]
        if not names or guard.action == "off":
            return ()
        dead = [name for name in names if not unmoved[name]]
        stuck = [name for name in names if unmoved[name]]
        parts = [
            f"{len(group)} {why} ({', '.join(group[:5])}{', …' if len(group) > 5 else ''})"
            for group, why in ((dead, "got no gradient"), (stuck, "got gradient and kept their value"))
            if group
        ]
        fixes = []
        if dead:
            fixes.append(
                "use a back-end that trains them (experts with LoRA, attention sinks), freeze them, "
                "or name them in rl.guards.parameters.may_stay"
            )
        if stuck:
            fixes.append("train float32 master weights, or raise rl.learning_rate: the update rounds to nothing")
        what = f"after {updates} updates trainable parameters have not moved: {'; '.join(parts)}"
        finding = Finding(guard.action, "", what, "; ".join(fixes))
        return (self._alarm("parameters", step, finding),)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, as plain values."""
        return {
            "history": self._history.state_dict(),
            "told": dict(self._told),
            "step": self._step,
            "skips": self._skips,
            "parameters_checked": self._parameters_checked,
            "learning_rate_scale": self.learning_rate_scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._history.load_state_dict(state["history"])
        self._told = dict(state["told"])
        self._step = state["step"]
        self._skips = state["skips"]
        self._parameters_checked = state["parameters_checked"]
        self.learning_rate_scale = state["learning_rate_scale"]

    def _non_finite(self, step: int, figures: Mapping[str, float | None]) -> list[Alarm]:
        wrong = {name: value for name, value in figures.items() if value is not None and not math.isfinite(value)}
        if not wrong:
            return []
        what = ", ".join(f"{name} is {value}" for name, value in wrong.items())
        figure, value = next(iter(wrong.items()))
        finding = Finding(self.config.non_finite.action, figure, what, NON_FINITE_FIX)
        return [self._alarm("non_finite", step, finding, latest=value)]

    def _alarm(self, guard: str, step: int, finding: Finding, latest: float | None = None) -> Alarm:
        """``latest``: the value that alarmed, where it is not (yet) in the history."""
        values = self._history.last(finding.figure, SHOWN) + ([] if latest is None else [latest])
        key = f"{guard}/{finding.action}"
        told = self._told.get(key)
        quiet = finding.action != "stop" and told is not None and step - told < self.config.repeat_after
        if not quiet:
            self._told[key] = step
            if finding.action == "lower_lr":
                self.learning_rate_scale *= self.config.lr_factor
        return Alarm(
            guard, finding.action, step, finding.what, finding.figure, tuple(values[-SHOWN:]), finding.fix, quiet
        )


def _ordered(alarms: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """Most severe first."""
    return tuple(sorted(alarms, key=lambda alarm: -SEVERITY[alarm.action]))
