"""The guards: each looks at the history and says what it finds. Thresholds come from ``GuardConfig`` alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rl.guards.config import Action, GuardConfig, Levels
from rl.guards.history import History

REWARD = "rl.reward"
CONSTANT = "rl.constant_groups"
SOLVED = "rl.solved_groups"
ENTROPY = "rl.entropy"
LENGTH = "rl.tokens"
THINKING = "rl.thinking_token_ratio"
GRADIENT = "rl.grad_norm"
CLIP_POSITIVE = "rl.clip_fraction_positive"
CLIP_NEGATIVE = "rl.clip_fraction_negative"
KL = "rl.kl_to_reference"


@dataclass(frozen=True)
class Finding:
    """What a rule found; ``figure`` is the one whose values explain it."""

    action: Action
    figure: str
    what: str
    fix: str


Limit = TypeVar("Limit", int, float)
Rule = Callable[[History, GuardConfig], Iterator[Finding]]


def worst(levels: Levels, value: float) -> tuple[Action, float] | None:
    """The most severe action whose limit ``value`` exceeds, and that limit."""
    limits: tuple[tuple[Action, float | None], ...] = (
        ("stop", levels.stop),
        ("lower_lr", levels.lower_lr),
        ("warn", levels.warn),
    )
    return next(((action, limit) for action, limit in limits if limit is not None and value > limit), None)


def check_levels(history: History, figure: str, levels: Levels, what: str, fix: str) -> Iterator[Finding]:
    """The most severe limit that the last ``patience`` values all exceed."""
    recent = history.last(figure, levels.patience)
    if figure not in history.now or len(recent) < levels.patience:
        return
    exceeded = worst(levels, min(recent))
    if exceeded is not None:
        action, limit = exceeded
        steps = f" for {levels.patience} steps" if levels.patience > 1 else ""
        yield Finding(action, figure, f"{what} is {recent[-1]:.3g}, above {limit:.3g}{steps}", fix)


def stop_then_warn(stop: Limit | None, warn: Limit | None) -> Iterator[tuple[Action, Limit]]:
    """The limits that are set, most severe first."""
    if stop is not None:
        yield "stop", stop
    if warn is not None:
        yield "warn", warn


def kl(history: History, config: GuardConfig) -> Iterator[Finding]:
    """The policy runs away from its reference, slowly or in one jump."""
    guard = config.kl
    fix = "lower rl.learning_rate or rl.epochs, or add a KL penalty"
    yield from check_levels(history, KL, guard, "KL to the reference (k3 per token)", fix)
    recent, past = history.last(KL, guard.patience), history.before(KL, guard.window, skip=guard.patience)
    if guard.jump_action == "off" or KL not in history.now or len(past) < guard.window:
        return
    median = statistics.median(past)
    if min(recent) > guard.jump_floor and min(recent) > guard.jump * median:
        what = f"KL to the reference jumped to {recent[-1]:.3g}, more than {guard.jump:g}x its median {median:.3g}"
        yield Finding(guard.jump_action, KL, what, fix)


def drift_k3(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Engine and trainer are two policies."""
    fix = (
        "compare attention back-ends (sinks), precision and router between engine and trainer; "
        "recompute the old log-probs instead of taking the engine's"
    )
    yield from check_levels(history, "rl.logprob_drift_k3", config.drift_k3, "KL(engine || trainer) per token", fix)


def drift(history: History, config: GuardConfig) -> Iterator[Finding]:
    """As :func:`drift_k3`, by the mean absolute difference."""
    fix = (
        "the engine holds other weights, another attention or another temperature; do not train on its samples "
        "before the log-probs agree"
    )
    what = "mean |log-prob of engine - of trainer|"
    yield from check_levels(history, "rl.logprob_drift", config.drift, what, fix)


def on_policy_ratio(history: History, config: GuardConfig) -> Iterator[Finding]:
    """The ratio is not 1 although nothing was updated yet."""
    fix = "switch dropout off, compute old and new log-probs in one mode, precision and layout"
    what = "max |ratio - 1| before any update"
    yield from check_levels(history, "rl.on_policy_ratio_error", config.on_policy_ratio, what, fix)


def stale_weights(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Episodes come from an older policy than the one they train."""
    fix = "the weight sync does not reach the engine: check its weight version and checksum after each sync"
    what = "updates missing in the engine's weights"
    yield from check_levels(history, "rl.weight_lag", config.stale_weights, what, fix)


def successful(history: History, config: GuardConfig, steps: int) -> bool:
    """Whether the reward of the last steps is high, or went a good part of the way from its start to 1."""
    now, start = history.recent(REWARD, steps), history.start(REWARD)
    if now is None or start is None:
        return False
    return now >= config.solved or (now > start and now - start >= config.progress * (1 - start))


def entropy(history: History, config: GuardConfig) -> Iterator[Finding]:
    """The policy became deterministic without having learned the task; certainty that pays is no collapse."""
    guard = config.entropy
    start, recent = history.start(ENTROPY), history.last(ENTROPY, guard.patience)
    if ENTROPY not in history.now or not start or len(recent) < guard.patience:
        return
    if successful(history, config, guard.patience):
        return
    share = max(recent) / start
    for action, limit in stop_then_warn(guard.stop, guard.warn):
        if share < limit:
            what = (
                f"entropy fell below {limit:.0%} of its start ({start:.3g}) for {guard.patience} steps, "
                "and the reward has not come along"
            )
            fix = "lower rl.learning_rate, raise rl.temperature or rl.clip.high, or use the entropy floor"
            yield Finding(action, ENTROPY, what, fix)
            return


def clip_asymmetry(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Only one sign of the advantage still learns."""
    guard = config.clip_asymmetry
    if CLIP_POSITIVE not in history.now or CLIP_NEGATIVE not in history.now:
        return
    positive, negative = history.last(CLIP_POSITIVE, guard.window), history.last(CLIP_NEGATIVE, guard.window)
    if min(len(positive), len(negative)) < guard.window:
        return
    above, below = statistics.fmean(positive), statistics.fmean(negative)
    exceeded = worst(guard, abs(below - above))
    if exceeded is None:
        return
    clipped, figure = ("negative", CLIP_NEGATIVE) if below > above else ("positive", CLIP_POSITIVE)
    what = (
        f"{below:.0%} of the tokens with A < 0 are clipped and {above:.0%} of those with A > 0 "
        f"(mean of {guard.window} steps): {clipped} episodes hardly teach"
    )
    fix = "recompute the old log-probs in the trainer (no bypass); widen rl.clip or lower rl.learning_rate"
    yield Finding(exceeded[0], figure, what, fix)


def zero_signal(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Nothing to learn from, and not because everything is solved."""
    guard = config.zero_signal
    if CONSTANT not in history.now:
        return
    # Without the count of solved groups the mean reward stands in: the same, where groups are constant at 0 or 1.
    solved_figure = SOLVED if SOLVED in history.now else REWARD
    for action, count in stop_then_warn(guard.stop, guard.warn):
        constant, solved = history.last(CONSTANT, count), history.last(solved_figure, count)
        if len(constant) < count or min(constant) < guard.constant or max(solved, default=0.0) >= guard.solved:
            continue
        what = (
            f"for {count} steps at least {min(constant):.0%} of the groups got one reward for all their episodes, "
            f"and at most {max(solved, default=0.0):.0%} are solved: no gradient"
        )
        fix = (
            "choose tasks the policy solves sometimes (a better cold start, easier or harder tasks), raise "
            "rl.group_size or rl.temperature, and check that the verifier can tell episodes apart"
        )
        yield Finding(action, CONSTANT, what, fix)
        return


def constant_reward(history: History, config: GuardConfig) -> Iterator[Finding]:
    """The verifier says the same of everything."""
    guard = config.constant_reward
    rewards, constant = history.last(REWARD, guard.steps), history.last(CONSTANT, guard.steps)
    if guard.action == "off" or REWARD not in history.now or CONSTANT not in history.now:
        return
    if len(rewards) < guard.steps or min(constant) < 1 or max(rewards) - min(rewards) > 1e-9:
        return
    learned = (history.lowest(CONSTANT) or 0.0) < 1
    if learned and rewards[-1] >= config.solved:
        return
    what = f"every episode of the last {guard.steps} steps got the reward {rewards[-1]:.4g}"
    fix = "run the verifiers on a right and a wrong answer: they must differ" + (
        "; if they do, the tasks are solved already and RL has nothing to teach"
        if rewards[-1] >= config.solved
        else "; if they do, no episode succeeds: improve the cold start or take easier tasks"
    )
    yield Finding(guard.action, REWARD, what, fix)


def length(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Episodes grow or shrink and it does not pay."""
    guard = config.length
    start, recent = history.start(LENGTH), history.recent(LENGTH, guard.patience)
    if LENGTH not in history.now or not start or recent is None:
        return
    before, after = history.start(REWARD), history.recent(REWARD, guard.patience)
    if before is not None and after is not None and after > before + guard.gain:
        return
    factor = max(recent / start, start / recent if recent else float("inf"))
    for action, limit in stop_then_warn(guard.stop, guard.warn):
        if factor > limit:
            direction = "grew" if recent > start else "shrank"
            what = f"episodes {direction} from {start:.3g} to {recent:.3g} sampled tokens without more reward"
            fix = (
                "use rl.aggregation dr or luspo (gspo prefers short right and long wrong answers), "
                "the overlong penalty, or a lower rl.max_tokens"
            )
            yield Finding(action, LENGTH, what, fix)
            return


def thinking_ratio(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Thinking disappears, or swallows the answer."""
    guard = config.thinking_ratio
    start, recent = history.start(THINKING), history.recent(THINKING, guard.patience)
    if guard.action == "off" or THINKING not in history.now or start is None or recent is None:
        return
    if start < guard.least or start >= 1:
        return
    odds = start / (1 - start)
    lowest, highest = odds / guard.factor, odds * guard.factor
    if lowest / (1 + lowest) <= recent <= highest / (1 + highest):
        return
    what = f"the share of thinking tokens went from {start:.3g} to {recent:.3g}"
    fix = "look at episodes of both ends: the reward may be won without thinking, or thinking may be padding"
    yield Finding(guard.action, THINKING, what, fix)


def repetition(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Episodes go round in circles."""
    fix = "use the repetition stop and penalty, lower rl.max_tokens, or go back to an earlier checkpoint"
    what = "the share of episodes that mostly repeat themselves"
    yield from check_levels(history, "rl.repetitive", config.repetition, what, fix)


def spike(history: list[float], value: float, config: GuardConfig) -> str | None:
    """Whether a gradient norm is a spike against the ``history`` before it, in words."""
    guard = config.gradient
    past = history[-guard.window :]
    if len(past) < guard.least:
        return None
    median = statistics.median(past)
    if value <= guard.floor or value <= guard.spike * median:
        return None
    return f"the gradient norm is {value:.3g}, {guard.spike:g}x its median {median:.3g} and more"


GRADIENT_FIX = "look at the episodes of this step (rare tokens, mismatch); lower rl.learning_rate or rl.max_grad_norm"


def gradient(history: History, config: GuardConfig) -> Iterator[Finding]:
    """An update far larger than those before it."""
    value = history.now.get(GRADIENT)
    if config.gradient.action == "off" or value is None:
        return
    what = spike(history.before(GRADIENT, config.gradient.window), value, config)
    if what is not None:
        yield Finding(config.gradient.action, GRADIENT, what, GRADIENT_FIX)


def truncated(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Episodes do not end by themselves."""
    fix = "raise rl.max_tokens, or check that the renderer's stop tokens are the ones the model was taught"
    what = "the share of episodes cut by the length limit"
    yield from check_levels(history, "rl.truncated", config.truncated, what, fix)


def unjudged(history: History, config: GuardConfig) -> Iterator[Finding]:
    """Episodes get no reward because judging fails."""
    fix = "read the evidence of the verdicts: a verifier crashes, times out, or a tool is down"
    yield from check_levels(history, "rl.unjudged", config.unjudged, "the share of unjudged episodes", fix)


RULES: dict[str, Rule] = {
    "kl": kl,
    "drift_k3": drift_k3,
    "drift": drift,
    "on_policy_ratio": on_policy_ratio,
    "stale_weights": stale_weights,
    "entropy": entropy,
    "clip_asymmetry": clip_asymmetry,
    "zero_signal": zero_signal,
    "constant_reward": constant_reward,
    "length": length,
    "thinking_ratio": thinking_ratio,
    "repetition": repetition,
    "gradient": gradient,
    "truncated": truncated,
    "unjudged": unjudged,
}
"""Guards over a step's figures, by name. ``non_finite`` and ``parameters`` live in the panel."""
