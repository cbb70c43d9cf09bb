"""The plan: what a step needs, whether it fits, and which knob to turn if it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from infra.compute.planner.activations import logits_bytes, naive_logits_bytes
from infra.compute.planner.hardware import RESERVE, Gpus
from infra.compute.planner.memory import Moment, host_bytes, moments
from infra.compute.planner.models import ModelShape
from infra.compute.planner.request import PlanRequest
from infra.errors import UsageError

CONTEXTS = tuple(2**power for power in range(12, 18))
"""4k … 128k."""
STEP, LONGEST = 1024, 2**24
"""The largest context is looked for in multiples of ``STEP`` up to ``LONGEST`` tokens."""
ASSUMPTIONS = (
    "gradients are summed over several micro-batches, and AdamW has stepped before",
    "two layers are gathered at a time: the one that computes and the next one",
    "tokens are spread evenly over experts and ranks",
    "float32 norms as in GPT-OSS; dense layers and other experts keep what plain autograd keeps",
    "on one rank the rollout engine has its own fused weights; on several it decodes with the gathered ones",
    "caches for rollouts stay in memory during training",
    "scratch memory of math libraries is not counted; bfloat16 on CPUs needs much of it (oneDNN's)",
)


@dataclass(frozen=True)
class Knob:
    """A change of the request, and the plan it leads to."""

    name: str
    saves: int
    """Bytes on each GPU, at the peak."""
    total: int
    fits: bool


@dataclass(frozen=True)
class ContextRow:
    """The same plan at another context."""

    context: int
    total: int
    per_token: float
    """Bytes of a rank that grow with the tokens, over the tokens of its micro-batch before they are divided."""
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What a request needs on each GPU, in bytes."""

    model: ModelShape
    request: PlanRequest
    moments: tuple[Moment, ...]
    contexts: tuple[ContextRow, ...]
    largest_context: int | None
    """Tokens; None = not even the shortest fits."""
    knobs: tuple[Knob, ...]
    """Only those that help, best first."""
    advice: tuple[str, ...]
    """Knobs which make it fit if all are turned; empty if it fits as it is, or if they are not enough."""

    @property
    def peak(self) -> Moment:
        """When the most memory is needed."""
        return max(self.moments, key=lambda moment: moment.parts.total)

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the reserve free."""
        return self.peak.parts.total <= self.request.gpus.usable

    @property
    def logits(self) -> dict[str, int]:
        """Bytes of logits that log-probs take: ``ours``, and ``naive`` for one whole float32 copy."""
        return {
            "ours": logits_bytes(self.model, self.request),
            "naive": naive_logits_bytes(self.model, self.request),
        }

    def payload(self) -> dict[str, Any]:
        """All of it as JSON values."""
        request, model, parts = self.request, self.model, self.peak.parts
        return {
            "model": model.name,
            "parameters": {"total": model.total} | dict(model.parameters),
            "gpus": {"count": request.gpus.count, "name": request.gpus.name, "gib": request.gpus.gib},
            "context": request.context,
            "batch": request.batch,
            "mode": request.mode,
            "weights": request.weights,
            "sharding": request.sharding.model_dump(mode="json"),
            "per_gpu": asdict(parts) | {"total": parts.total},
            "peak": self.peak.name,
            "moments": {moment.name: moment.parts.total for moment in self.moments},
            "host_per_gpu": host_bytes(model, request),
            "reserve": RESERVE,
            "usable": request.gpus.usable,
            "fits": self.fits,
            "logits": self.logits,
            "contexts": [asdict(row) for row in self.contexts],
            "largest_context": self.largest_context,
            "knobs": [asdict(knob) for knob in self.knobs],
            "advice": list(self.advice),
            "assumptions": list(ASSUMPTIONS),
        }


def make_plan(model: ModelShape, request: PlanRequest) -> Plan:
    """Plan a request.

    Raises:
        UsageError: the ranks, experts, heads or tokens cannot be divided as asked.
    """
    found = tuple(moments(model, request))
    return Plan(
        model,
        request,
        found,
        contexts=tuple(_at_context(model, request, context) for context in CONTEXTS),
        largest_context=largest_context(model, request),
        knobs=tuple(knob for knob, _ in _helpful(model, request)),
        advice=_advice(model, request),
    )


def peak_bytes(model: ModelShape, request: PlanRequest) -> int:
    """The most bytes needed on a GPU at once.

    Raises:
        UsageError: the ranks cannot be divided as asked.
    """
    return max(moment.parts.total for moment in moments(model, request))


def largest_context(model: ModelShape, request: PlanRequest) -> int | None:
    """The longest context that fits, a multiple of 1024; None = none does."""
    low, high = 0, LONGEST // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if peak_bytes(model, replace(request, context=middle * STEP)) <= request.gpus.usable:
            low = middle
        else:
            high = middle - 1
    return low * STEP or None


def _at_context(model: ModelShape, request: PlanRequest, context: int) -> ContextRow:
    there = replace(request, context=context)
    found = moments(model, there)
    total = max(m.parts.total for m in found)
    growing = max(m.parts.activations + m.parts.kv_cache + m.parts.logits for m in found)
    return ContextRow(context, total, growing / (context * request.batch), total <= request.gpus.usable)


def _changes(model: ModelShape, request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Every knob, turned by one notch or more."""

    def sharding(**update: Any) -> PlanRequest:
        return replace(request, sharding=request.sharding.model_copy(update=update))

    here = request.sharding
    if request.mode != "infer" and not here.activation_checkpointing:
        yield "--checkpointing", sharding(activation_checkpointing=True)
    if here.precision == "float32":
        yield "--precision bfloat16", sharding(precision="bfloat16")
    if request.weights == "float32":
        yield "--weights bfloat16", replace(request, weights="bfloat16")
    for ranks in (2, 4, 8, 16, 32, 64):
        if ranks > here.sequence:
            yield f"--sequence {ranks}", sharding(sequence=ranks)
        if ranks > here.expert:
            yield f"--expert {ranks}", sharding(expert=ranks)
    if request.mode != "infer" and not here.offload:
        yield "--offload", sharding(offload=True)
    if request.mode in ("rl", "sft"):
        yield "--mode lora", replace(request, mode="lora")
    if request.batch > 1:
        yield f"--batch {request.batch // 2}", replace(request, batch=request.batch // 2)
    for times in (2, 4):
        gpus = Gpus(request.gpus.count * times, request.gpus.name, request.gpus.gib)
        yield f"--gpus {gpus}", replace(request, gpus=gpus)


def _helpful(model: ModelShape, request: PlanRequest) -> list[tuple[Knob, PlanRequest]]:
    """Knobs that save memory, best first; those that cannot be turned here are left out."""
    before, found = peak_bytes(model, request), list[tuple[Knob, PlanRequest]]()
    for name, changed in _changes(model, request):
        try:
            total = peak_bytes(model, changed)
        except UsageError:
            continue
        if total < before:
            found.append((Knob(name, before - total, total, total <= request.gpus.usable), changed))
    return sorted(found, key=lambda entry: -entry[0].saves)


def _advice(model: ModelShape, request: PlanRequest) -> tuple[str, ...]:
    """Turn the knob that saves most, again and again, until it fits; none that changes what is computed or bought."""
    keep = ("--gpus", "--mode", "--batch", "--weights", "--offload")
    taken: list[str] = []
    while peak_bytes(model, request) > request.gpus.usable:
        choices = [(k, r) for k, r in _helpful(model, request) if not k.name.startswith(keep)]
        if not choices:
            return ()
        knob, request = choices[0]
        taken = [name for name in taken if name.split()[0] != knob.name.split()[0]] + [knob.name]
    return tuple(taken)
