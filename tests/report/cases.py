"""Plans made by hand: their numbers are chosen to be recognised, not to be right."""

import re
from dataclasses import replace

from rich.console import Console, RenderableType

from farspan.planner.machines import machine
from farspan.planner.request import Budget, Plan, Question, Remedy, Seconds
from farspan.program.layout import Layout
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Tier

GIB = 2**30
LAYER = LayerSpec(query_heads=8, kv_heads=8, head_dim=64, value_dim=64)
MODEL = ModelSpec("Some-7B", hidden=512, vocab=1000, layers=(LAYER,) * 28, element_bytes=2)


def text_of(view: RenderableType, width: int = 100) -> str:
    """As printed, each run of blanks one blank."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view)
    return re.sub(r"[ \n]+", " ", capture.get())


def question(tokens: int = 2**20, layout: Layout | None = None) -> Question:
    return Question(MODEL, RunSpec(1, tokens), machine("h200"), layout or Layout())


def fitting(strategy: str = "grouped", tokens: int = 2**20) -> Plan:
    """30 GiB of 80 on the device, 100 GiB of 512 on the host, 256 s a step."""
    return Plan(
        strategy=strategy,
        schedule=Schedule(
            chunk=16384,
            groups=4,
            attention=Tier.HOST,
            attention_save_fraction=1.0,
            activation_save_fraction=0.25,
        ),
        question=question(tokens),
        device=Budget({"weights": 14 * GIB, "kv": 16 * GIB}, 80 * GIB),
        host=Budget({"attention": 70 * GIB, "optimizer": 30 * GIB}, 512 * GIB),
        seconds=Seconds(256.0, 200.0, 50.0, 40.0, 0.0, 5.0, 1.0, "compute"),
        mfu=0.4321,
        reason="fastest of those that fit",
    )


def overrun() -> Plan:
    """48 GiB too much on the device."""
    plan = fitting()
    return replace(
        plan,
        device=Budget({"weights": 128 * GIB}, 80 * GIB),
        reason="weights and optimizer alone need 128 GiB",
        remedies=(Remedy("--gpus 2", same=True, means="of the 8 in a machine"),),
    )
