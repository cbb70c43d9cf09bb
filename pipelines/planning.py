"""``senmon plan``: a memory plan as tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from pipelines.output import table

if TYPE_CHECKING:
    from rich.console import Console

    from infra.compute.planner.plan import Plan

GIB = 2**30


def show_plan(console: Console, plan: Plan) -> None:
    """Draw a plan: the parts at the peak, longer contexts, and knobs."""
    request, model, parts = plan.request, plan.model, plan.peak.parts
    logits = plan.logits
    console.print(
        f"{model.name}: {model.total / 1e9:.2f} B parameters; {request.mode} on {request.gpus}, context "
        f"{request.context}, batch {request.batch}",
        highlight=False,
    )
    rows = [(name.replace("_", " "), f"{value / GIB:.2f}") for name, value in asdict(parts).items() if value]
    rows += [("total", f"{parts.total / GIB:.2f}"), ("usable", f"{request.gpus.usable / GIB:.2f}")]
    table(console, ("per GPU", "GiB"), rows)
    console.print(
        f"peak: {plan.peak.name}; {'fits' if plan.fits else 'does NOT fit'}. Largest context that fits: "
        f"{plan.largest_context or 'none'}. Logits: {logits['ours'] / GIB:.2f} GiB; one whole float32 copy would be "
        f"{logits['naive'] / GIB:.2f} GiB.",
        highlight=False,
    )
    table(
        console,
        ("context", "GiB per GPU", "KiB per token", "fits"),
        [
            (row.context, f"{row.total / GIB:.2f}", f"{row.per_token / 1024:.1f}", "yes" if row.fits else "no")
            for row in plan.contexts
        ],
    )
    if plan.knobs:
        table(
            console,
            ("knob", "saves GiB", "GiB then", "fits then"),
            [(k.name, f"{k.saves / GIB:.2f}", f"{k.total / GIB:.2f}", "yes" if k.fits else "no") for k in plan.knobs],
        )
    if request.gpus.cpu and request.sharding.precision == "bfloat16":
        console.print("bfloat16 on CPUs needs more than this: oneDNN's scratch memory is not counted", highlight=False)
    if plan.advice:
        console.print(f"It fits with {' '.join(plan.advice)}", highlight=False)
