"""What `farspan plan` answers: for a person, for a program, as a picture of a step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from farspan.plan.question import Plan, Question
from farspan.report.plan import contexts_view, plan_view
from farspan.report.timeline import timeline_json
from farspan.spec import Refused


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


@dataclass(frozen=True, slots=True)
class Answer:
    """The plan of the context asked for, the longest contexts, or both."""

    question: Question
    plan: Plan | None
    longest: Longest | None
    words: tuple[str, ...] = ()  # of the run that is planned, below its plan
    run: Mapping[str, Any] = field(default_factory=dict)  # what a program reads of it

    def chosen(self) -> Plan | None:
        """The plan of the context asked for, or of the longest where none was."""
        if self.plan is not None or self.longest is None:
            return self.plan
        return self.longest.best()

    def to_json(self) -> dict[str, Any]:
        """The chosen plan; beside it, where they were asked for, the longest contexts."""
        chosen = self.chosen()
        answer = {"fits": False} if chosen is None else {**chosen.to_json(), **self.run}
        return answer if self.longest is None else answer | self.longest.to_json()

    def show(self) -> None:
        """Print the answer for a person."""
        console = Console()
        if self.plan is not None:
            console.print(plan_view(self.plan))
        for line in self.words:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self.longest is None:
            return
        console.print(contexts_view(self.longest.plans, self.question, self.longest.strategies))
        best = self.longest.best()
        if self.plan is None and best is not None:
            console.print(plan_view(best))


def write_timeline(path: Path, plan: Plan | None) -> None:
    """The plan's step as a trace. Raises Refused where there is no plan, or no such place."""
    if plan is None:
        raise Refused("timeline: no strategy fits at any context, so there is no step to draw")
    try:
        path.write_text(json.dumps(timeline_json(plan)) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused(f"timeline: {path} cannot be written: {error}") from error
