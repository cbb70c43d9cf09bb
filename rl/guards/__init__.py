"""Guards: a run that stops learning, or learns the wrong thing, says so."""

from rl.guards.alarm import Alarm, raise_on_stop
from rl.guards.config import GuardConfig
from rl.guards.panel import GuardPanel

__all__ = ["Alarm", "GuardConfig", "GuardPanel", "raise_on_stop"]
