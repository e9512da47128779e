"""`farspan plan`: will it fit, how long is a step, what is the longest context?"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farspan.cli.ending import FAILED, typer_app
from farspan.plan.ask import AS_IN_RUN_FILES, HERE, Request
from farspan.plan.model.catalog import presets
from farspan.plan.pages import EXAMPLE, read_sparse
from farspan.plan.price.machines import names as machine_names
from farspan.plan.question import Optimizer, Plan, Question
from farspan.plan.search.plans import best_plan, longest_contexts
from farspan.plan.strategies import AUTO, STRATEGIES
from farspan.report.plan import contexts_view, plan_view
from farspan.report.timeline import timeline_json
from farspan.spec import Refused

app = typer_app()


MODELS = ", ".join(preset.name for preset in presets())
MACHINES = ", ".join(machine_names())

Model = Annotated[
    str,
    typer.Option(
        help=f"Folder, config.json, hub name (its configuration only), or a preset: {MODELS}."
    ),
]
Context = Annotated[
    str | None,
    typer.Option(help="Tokens of a sequence: 131072, 128K, 1M; K and M are 2**10 and 2**20."),
]
Machine = Annotated[
    str,
    typer.Option(
        help="A file of `farspan calibrate`, `here` (measured where it was not yet), or a preset: "
        f"{MACHINES}."
    ),
]
StrategyName = Annotated[
    str, typer.Option(help=f"{AUTO}, the best of all, or one of {', '.join(STRATEGIES)}.")
]
OptimizerName = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(Optimizer)}; or as in a run file: "
        f"{', '.join((*AS_IN_RUN_FILES, Optimizer.HOST))}."
    ),
]
DeviceMemory = Annotated[
    str | None, typer.Option(help="Of one device, in place of the machine's: 80GB, 80GiB.")
]
HostMemory = Annotated[
    str | None, typer.Option(help="Of the node, in place of the machine's: 128GiB.")
]
Lora = Annotated[
    int, typer.Option(help="Rank of adapters on every linear module; 0 trains all weights.")
]
SparseText = Annotated[
    str | None,
    typer.Option(
        "--sparse",
        help="Page-sparse attention, which approximates: on (8K tokens of chosen pages and 4K "
        f"recent ones), off, or fields such as {EXAMPLE}.",
    ),
]
LongestToo = Annotated[
    bool, typer.Option("--max-context", help="Find the longest context of each strategy.")
]
Timeline = Annotated[
    Path | None,
    typer.Option(help="Write the planned step here as a trace that ui.perfetto.dev draws."),
]


@app.command("plan")
def plan_command(
    model: Model,
    context: Context = None,
    machine: Machine = HERE,
    gpus: Annotated[int, typer.Option(help="Devices that share the sequence.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 1,
    strategy: StrategyName = AUTO,
    optimizer: OptimizerName = Optimizer.ADAMW,
    lora: Lora = 0,
    dtype: Annotated[str, typer.Option(help="bf16, fp32 or fp64.")] = "bf16",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    sparse: SparseText = None,
    max_context: LongestToo = False,
    timeline: Timeline = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Will it fit, how long is a step, what is the best schedule; exit 1 if it does not fit."""
    if context is None and not max_context:
        raise Refused("context: give --context TOKENS, or --max-context to find the longest")
    request = Request(
        config=model,
        context=1 if context is None else context,
        machine=machine,
        gpus=gpus,
        batch=batch,
        strategy=strategy,
        optimizer=optimizer,
        lora=lora,
        dtype=dtype,
        device_memory=device_memory,
        host_memory=host_memory,
        sparse=None if sparse is None else read_sparse(sparse),
        progress=tell,
    )
    question, strategies = request.question(), request.strategies()
    plan = None if context is None else best_plan(question, strategies)
    longest = None
    if max_context:
        found = longest_contexts(question, strategies)
        longest = Longest(tuple(strategies or STRATEGIES), found)
    chosen = _chosen(plan, longest)
    if timeline is not None:
        write_timeline(timeline, chosen)
    if as_json:
        print(json.dumps(answer_json(plan, longest)))
    else:
        show(question, plan, longest)
    raise typer.Exit(0 if chosen and chosen.fits else FAILED)


def tell(what: str) -> None:
    """Measuring takes up to a minute: what is measured is said beside the answer."""
    print(f"this machine: {what}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Longest:
    """The plans at the longest contexts, of those strategies that fit at any."""

    strategies: tuple[str, ...]  # all that were tried
    plans: dict[str, Plan]

    def best(self) -> Plan | None:
        """The plan of the longest context; of equals the fastest."""
        return max(
            self.plans.values(),
            key=lambda plan: (plan.question.run.tokens, -plan.seconds.total),
            default=None,
        )

    def to_json(self) -> dict[str, Any]:
        """The longest context of all and of each strategy, 0 where none fits."""
        best = self.best()
        each = {name: {"fits": False, "max_context": 0} for name in self.strategies}
        for name, plan in self.plans.items():
            each[name] = plan.to_json() | {"max_context": plan.question.run.tokens}
        tokens = 0 if best is None else best.question.run.tokens
        return {"max_context": tokens, "max_context_by_strategy": each}


def write_timeline(path: Path, plan: Plan | None) -> None:
    """The plan's step as a trace. Raises Refused where there is no plan, or no such place."""
    if plan is None:
        raise Refused("timeline: no strategy fits at any context, so there is no step to draw")
    try:
        path.write_text(json.dumps(timeline_json(plan)) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused(f"timeline: {path} cannot be written: {error}") from error


def show(question: Question, plan: Plan | None, longest: Longest | None) -> None:
    """Print the answer for a person."""
    console = Console()
    if plan is not None:
        console.print(plan_view(plan))
    if longest is None:
        return
    console.print(contexts_view(longest.plans, question, longest.strategies))
    best = longest.best()
    if plan is None and best is not None:
        console.print(plan_view(best))


def _chosen(plan: Plan | None, longest: Longest | None) -> Plan | None:
    return plan if plan is not None or longest is None else longest.best()


def answer_json(plan: Plan | None, longest: Longest | None) -> dict[str, Any]:
    """The plan of the context asked for, or of the longest where none was; beside it, where they
    were asked for, the longest contexts."""
    chosen = _chosen(plan, longest)
    answer = {"fits": False} if chosen is None else chosen.to_json()
    return answer if longest is None else answer | longest.to_json()
