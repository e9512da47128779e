"""Views of a plan: a short answer, tables, and its step as a trace of events."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from farspan.formatting import (
    COLUMNS,
    fold,
    write_bytes,
    write_most,
    write_seconds,
    write_tokens,
)
from farspan.planner.evaluate import most_layers, programs, size, slowest, stage_schedule
from farspan.planner.feasibility import loss_seconds
from farspan.planner.machines import names, read
from farspan.planner.prices import Prices
from farspan.planner.remedies import fuller, part_words, place_words
from farspan.planner.request import Budget, Fit, Optimizer, Plan, Question
from farspan.planner.states import drive_bytes, update_overlaps
from farspan.planner.timeline import Span, spans
from farspan.program.builder import chunks_of
from farspan.program.program import (
    AttentionMode,
    Backward,
    Close,
    Evict,
    Fetch,
    Forward,
    Instruction,
    Program,
)
from farspan.report.tables import (
    RUN_FILE,
    bar,
    bars_table,
    launch_words,
    layout_words,
    lines_table,
    schedule_words,
)
from farspan.spec import PAIRS, LossKind, Quantization, Reference, Tier

MFU_CONVENTION = (
    "FLOP of one forward and twice that for the backward, attention over the keys a query sees, "
    "recomputation counted as no work, over the datasheet's dense rate"
)
IN_LINE = "copies are priced without overlap with the computation, as the engine issues them {}\n"
EIGHT_BIT = (
    "8-bit moments give other results than AdamW's; enable them with optimizer.states: 8bit, "
    "which needs farspan[8bit]"
)
SPARSE = (
    "sparse attention is an approximation; run farspan verify --sparse to measure its error; "
    "training logs how much attention it sees"
)
FP8 = (
    "products in fp8 are an approximation; farspan verify RUN.yaml measures its error beside "
    "bfloat16's own on your model"
)
SEES_ALL = (
    "sparse attention hides nothing at this context and equals dense attention, up to rounding; "
    "without --sparse, a step is just as exact and faster"
)
RECURRENT = (
    "only the projections of recurrent layers are priced, not the recurrence: a step takes "
    "longer than planned, most of all without the family's own kernels"
)
NOTHING_HELPS = "no change that farspan tried makes this run fit"
FITS = {Fit.NOT: "no", Fit.TIGHT: "tight", Fit.ROOMY: "yes"}
FITTING = {Fit.NOT: "does not fit", Fit.TIGHT: "fits, tightly", Fit.ROOMY: "fits"}
LANES = {
    "compute": "computation",
    "fetch": "host to device",
    "evict": "device to host",
    "collective": "between devices",
    "optimizer": "update",
    "beside": "update, during the next step",
    "host": "issuing work",
}


def plan_view(plan: Plan) -> RenderableType:
    """Return all about a plan as tables: verdict, bytes, seconds, schedule, runners-up."""
    near = plan.question.near()
    parts: list[RenderableType] = [
        verdict(plan),
        budget_table("device", plan.device),
        Text(),
        budget_table("host", plan.host, plan.question.machine.host_reserve // near),
        Text(),
        seconds_table(plan),
        schedule_view(plan),
    ]
    if plan.alternatives:
        parts += [alternatives_table(plan), Text()]
    return Group(*parts)


# -- an answer of a screen -------------------------------------------------------------------------

LINES = 25
CAUSES = ((5, 3), (3, 3), (2, 2), (0, 0))  # causes named on device and host; the rest are summed
RUNNERS_UP = 3
CHANGES = 3
ALL = "for all details: --all; for an HTML page: --html FILE"
BOUND = {
    "compute": "computation",
    "link": "host-device copies",
    "network": "the network",
    "host": "kernel launches",
}


def plan_text(plan: Plan) -> str:
    """Return the short answer about a plan as plain text."""
    return "\n".join(answer_lines(plan))


def answer_view(plan: Plan, room: int = LINES, run_file: str = RUN_FILE) -> Text:
    """Return the short answer about a plan for a terminal, with the verdict in green or red."""
    text = Text("\n".join(answer_lines(plan, room, run_file)), no_wrap=True, overflow="ignore")
    text.stylize("bold green" if plan.fits else "bold red", 0, len(FITTING[plan.fit]))
    return text


def answer_lines(plan: Plan, room: int = LINES, run_file: str = RUN_FILE) -> list[str]:
    """Return the short answer about a plan in at most `room` lines of 80 columns: if it fits, how;
    else which memory is too small and which changes help. To save lines, smaller causes are summed
    up first, then the last sentences dropped."""
    head = [*_folded(answer(plan)), *_folded(subject(plan)), ""]
    end, said, lines = ["", ALL], list(_change_parts(plan)), head
    if plan.fits:
        first, *others = map(_folded, _fitting_lines(plan, run_file))
        end, said = [ALL], [["", *first], *others]
    for most in CAUSES if plan.fits else CAUSES[1:]:
        lines = [*head, *_tier_lines(plan, most)]
        if len(lines) + sum(map(len, said[:3])) + len(end) <= room:
            break
    for part in said:
        if len(lines) + len(part) + len(end) <= room:
            lines += part
    return [*lines, *end]


def _fitting_lines(plan: Plan, run_file: str) -> Iterator[str]:
    """Yield sentences about a plan that fits, the most important first."""
    yield _step_words(plan)
    yield _schedule_sentence(plan)
    yield f"runners-up: {_runners_up(plan)}" if plan.alternatives else ""
    yield from [tight_words(plan).split(";")[0]] * plan.tight
    yield from (note.split(";")[0].replace(RUN_FILE, run_file) for note in notes(plan))


def answer(plan: Plan) -> str:
    """Say whether a plan fits, where weights and optimizer states live, and a step's time."""
    if not plan.fits:
        return f"{FITTING[plan.fit]}: {short_words(plan)}"
    return f"{FITTING[plan.fit]}: {chosen_words(plan)}"


def short_words(plan: Plan) -> str:
    """Name the memories that are too small for a plan, with the missing bytes."""
    if plan.question.machine.unified:
        return f"lacks {write_bytes(-fuller(plan)[1].left)} of memory"
    tiers = (("device", plan.device), ("main", plan.host))
    short = (f"{write_bytes(-tier.left)} of {name} memory" for name, tier in tiers if tier.left < 0)
    return f"lacks {' and '.join(short)}"


def _folded(text: str) -> list[str]:
    return fold(text, COLUMNS)


def _tier_lines(plan: Plan, most: tuple[int, int]) -> Iterator[str]:
    """Yield lines about device and host memory: the bytes, and the largest causes, at most `most`
    of (device, host). If the plan does not fit, leave out memory that is large enough."""
    tiers = (("device", plan.device), ("main memory", plan.host))
    if plan.question.machine.unified:
        tiers = (("memory, the device's part", plan.device), ("memory, the host's part", plan.host))
    for (name, budget), many in zip(tiers, most, strict=True):
        if plan.fits or budget.left < 0:
            yield from _budget_lines(name, budget, many)


def _budget_lines(tier: str, budget: Budget, most: int) -> list[str]:
    """Return a line with the bytes of one memory, and lines with its causes, the largest first."""
    parts = sorted((part for part in budget.parts.items() if part[1]), key=lambda part: -part[1])
    rows = [(part_words(name), size) for name, size in parts]
    if len(rows) > most:
        rows = [*rows[: most - 1], ("others", sum(size for _, size in rows[most - 1 :]))][:most]
    whole = max(budget.limit, budget.total, 1)
    named = [
        f"  {name:<36} {write_bytes(size):>10}  {bar(size / whole)}".rstrip() for name, size in rows
    ]
    limit = write_bytes(max(0, budget.limit))
    return [f"{tier}: {write_bytes(budget.total)} of {limit}", *named]


def _step_words(plan: Plan) -> str:
    return (
        f"step: {write_seconds(plan.seconds.total)}, {_rate(plan)} tokens/s, MFU {plan.mfu:.1%}, "
        f"bound by {BOUND[plan.seconds.bound]}"
    )


def _schedule_sentence(plan: Plan) -> str:
    question = plan.question
    chunks = len(chunks_of(question.model, question.run.tokens, plan.schedule, question.layout))
    schedule = stage_schedule(question, plan.schedule)
    words = schedule_words(schedule, most_layers(question), chunks)
    walk, _, *kept = words[: 5 if schedule.sparse is None else 6]
    return f"schedule: {plan.strategy}, {'; '.join((walk, *kept))}"


def _runners_up(plan: Plan) -> str:
    fitting = [other for other in plan.alternatives if other.fits]
    named = [f"{o.strategy} {write_seconds(o.seconds.total)}" for o in fitting[:RUNNERS_UP]]
    others = len(plan.alternatives) - len(fitting)
    named += [f"{others} more {'does' if others == 1 else 'do'} not fit"] * bool(others)
    return ", ".join(named)


def _change_parts(plan: Plan) -> Iterator[list[str]]:
    """Yield the lines about each of the cheapest changes that make a plan fit."""
    if not plan.remedies:
        yield ["", *_folded(f"changes: {NOTHING_HELPS}; use fewer tokens, or larger GPUs")]
    for place, change in enumerate(change_words(plan)):
        title = ["", "cheapest changes that make it fit:"] if place == 0 else []
        yield [*title, *(f"  {line}" for line in fold(change, COLUMNS - 2))]


def change_words(plan: Plan, most: int = CHANGES) -> Iterator[str]:
    """Yield a line per cheap change that makes a plan fit: its step time, and its effects."""
    for remedy in plan.remedies[:most]:
        gives = f"{write_seconds(remedy.seconds)} a step" if remedy.seconds else ""
        results = "the same results" if remedy.same else "other results"
        means = ", ".join(filter(None, (gives, results, remedy.means)))
        yield f"{remedy.options}: {means}"


# -- everything ------------------------------------------------------------------------------------


def verdict(plan: Plan) -> Text:
    """Return a text that says whether a plan fits, and the spare bytes or the changes that help."""
    text = Text(f"{answer(plan)}\n{subject(plan)}\n")
    text.stylize("bold green" if plan.fits else "bold red", 0, len(FITTING[plan.fit]))
    more = verdict_lines(plan) if plan.fits else [plan.reason] * bool(plan.reason)
    if not plan.fits:
        changes = list(change_words(plan, len(plan.remedies))) or [NOTHING_HELPS]
        more += [
            f"{'or' if place else 'cheapest change'}: {text}" for place, text in enumerate(changes)
        ]
    text.append("\n".join([*more, *(f"note: {note}" for note in notes(plan)), ""]))
    return text


def chosen_words(plan: Plan) -> str:
    """Say where optimizer states, weights and gradients live, and how long a step takes."""
    return f"{place_words(plan.question)}, {write_seconds(plan.seconds.total)} a step"


def verdict_lines(plan: Plan) -> list[str]:
    """Return a line with the memory that a plan leaves free, and a warning if little is left."""
    lines = [f"{_spare(plan.device)} on the device, {_spare(plan.host)} on the host"]
    if plan.question.machine.unified:
        lines = [f"{_spare(plan.device)} in the memory that device and host share"]
    return [*lines, *[tight_words(plan)] * plan.tight]


def tight_words(plan: Plan) -> str:
    """Return the warning that a plan leaves less memory free than the margin, and its reason."""
    margin, machine = plan.question.margin, plan.question.machine
    if not machine.unified and plan.device.left < margin.device:
        size, what, left = margin.device, "of a device", plan.device.left
        use = "fragmentation, library workspaces and communication"
    else:
        size, what, left = margin.host // plan.question.near(), "of main memory", plan.host.left
        use = "the machine's other processes"
    return (
        f"tight: {write_bytes(size)} {what} should stay free for {use}, but only "
        f"{write_bytes(left)} is; use a shorter context, or keep less in this memory"
    )


def notes(plan: Plan) -> Iterator[str]:
    """Yield notes on a plan for users to read before training."""
    question = plan.question
    if question.machine.name in names() and (note := read(question.machine.name).note):
        yield note
    run, longest = question.run, question.longest()
    if longest and run.tokens > longest:
        reach = write_tokens(longest)
        if question.learned_positions():
            yield (
                f"the context exceeds the model's {reach} positions, which are learned one by one "
                "and cannot be stretched, so farspan train refuses this run"
            )
        else:
            yield f"context beyond the model's {reach} positions; scale its RoPE to train"
    advised = " ".join(remedy.options for remedy in plan.remedies)
    asked = f"--optimizer {question.optimizer} {advised} "
    if question.optimizer is Optimizer.DISK:
        yield _drive_wear(question)
    if f"--optimizer {Optimizer.ADAMW8BIT} " in asked:
        yield EIGHT_BIT
    if question.nf4:
        yield from _quantisation_note(question)
    yield from loss_words(plan)
    if question.sparse is not None:
        yield SPARSE if plan.hides else SEES_ALL
    if question.kernels.products is not None:
        yield FP8
    if question.model.is_recurrent():
        yield RECURRENT
    if question.layout.devices() > 1:
        yield f"to start this run: {launch_words(question)}"
    elif "--gpus" in advised:
        yield "with --gpus, farspan plan prints the command that starts farspan train on these GPUs"


ENDURANCE = 600e12  # bytes written over the life of a drive of 1 TB, assumed


def _drive_wear(question: Question) -> str:
    """Describe what an update costs if optimizer states are on a drive: seconds to read and write
    them, and the share of the bytes that the drive can write in its life."""
    size, rate = drive_bytes(question) * question.near(), question.machine.disk
    return (
        f"each update reads and writes {size / 1e9:,.1f} GB of states, {2 * size / rate:,.1f} s at "
        f"{rate / 1e9:g} GB/s, and takes {size / ENDURANCE:.3%} of the {ENDURANCE / 1e12:g} TB "
        f"that a drive endures, which suffice for {ENDURANCE / max(1, size):,.0f} steps; endurance "
        "and rate are assumed, unless the machine file gives the rate"
    )


def drive_json(question: Question) -> dict[str, Any]:
    """Return a drive's time and wear per update for JSON; empty if no states are on a drive."""
    size = drive_bytes(question) * question.near()
    if not size:
        return {}
    seconds, endures = 2 * size / question.machine.disk, ENDURANCE
    drive = {"bytes_a_step": size, "seconds": seconds, "endures_steps": endures / size}
    return {"drive": drive | {"endures_bytes": endures, "bytes_a_second": question.machine.disk}}


PLACES = {
    Reference.NONE: "no reference",
    Reference.FROZEN: "the forward of its reference, a frozen copy of the weights in",
    Reference.ADAPTERS_OFF: "the forward of its reference, the same weights with adapters off",
    Reference.STORED: "its reference is stored with the data",
}


def loss_words(plan: Plan) -> Iterator[str]:
    """Describe what a loss of log-probabilities, and its reference model, cost in each step."""
    loss = plan.question.loss
    if not loss.is_cut:
        return
    one, cut, whole = loss_seconds(plan)
    where = PLACES[loss.reference]
    if loss.reference is Reference.FROZEN:
        tier = "main memory" if plan.question.weights is Tier.HOST else "device memory"
        where = f"{where} {tier}"
    if loss.evaluates:
        where = f"{(whole - cut) / one:.1%} for {where}"
    why = "log-probabilities come before the backward"
    why += " and mismatched answers are read" * (loss.kind is LossKind.KTO)
    yield (
        f"loss {loss.kind}: a step takes {whole / one - 1:.1%} longer than one pass of this "
        f"schedule: {cut / one - 1:.1%} because {why}, {where}"
    )
    if loss.kind.row.format == PAIRS:
        yield "a pair of answers is priced as one document: real steps take less"
    if loss.ids > 1:
        size = "; in a run, it runs at every step: --reference frozen plans that"
        if loss.evaluates:
            size = ", with a teacher as large as the model"
        yield f"planned for {loss.ids} ids per token from the teacher{size}"


def loss_json(plan: Plan) -> dict[str, Any]:
    """Return a step's seconds with three losses: a mean over tokens, the plan's loss with the
    reference's log-probabilities stored, and the plan's loss. Empty if the plan's is a mean."""
    if not plan.question.loss.is_cut:
        return {}
    one, cut, whole = loss_seconds(plan)
    names = "one_pass", "with_logprobs", "with_reference"
    return {"seconds_of_loss": dict(zip(names, (one, cut, whole), strict=True))}


def _quantisation_note(question: Question) -> Iterator[str]:
    """Warn if 4-bit quantisation saves less than half of the weights' bytes."""
    model = question.model
    plain = model.parameters * model.element_bytes
    packed = plain - sum(layer.work.packed for layer in model.layers)
    if packed > plain / 2:
        yield (
            f"weights take {write_bytes(packed)} with four bits and {write_bytes(plain)} without: "
            "only linear modules are quantised, not embeddings, and not experts whose weights are "
            f"stacked; if that is too much, use --optimizer {Optimizer.HOST} --weights {Tier.HOST} "
            "instead of --quantize"
        )


def subject(plan: Plan) -> str:
    """Describe a plan's subject in one line: model, tokens, devices and optimizer."""
    question = plan.question
    run, attention = question.run, ""
    if question.sparse is not None:
        attention = f", sparse attention ({'approximate' if plan.hides else 'nothing is hidden'})"
    if question.kernels.products is not None:
        attention += f", products in {question.kernels.products} (approximate)"
    rank = question.adapter_rank()
    adapters = f", lora {rank}" if rank else ""
    weights = ", weights on host" if question.weights is Tier.HOST else ""
    if rank is None and question.model.trainable < question.model.parameters:
        adapters = (
            f", {question.model.trainable / question.model.parameters:.2%} of the weights trained"
        )
    adapters += f", {Quantization.NF4}" * question.nf4
    sequences = f"{run.batch} sequences of " if run.batch > 1 else ""
    return (
        f"{question.model.name}{adapters}, {sequences}{write_tokens(run.tokens)} tokens, "
        f"{devices_words(question)}, {question.dtype}, optimizer {question.optimizer}{weights}"
        f"{attention}"
    )


def devices_words(question: Question) -> str:
    """Return the number and type of the devices, and how they share a step."""
    layout = question.layout
    devices = f"{layout.devices()} x {question.machine.name}"
    return f"{devices} ({layout_words(layout)})" if layout.devices() > 1 else devices


def _spare(budget: Budget) -> str:
    return f"{write_bytes(budget.left)} to spare"


def budget_table(tier: str, budget: Budget, reserve: int = 0) -> Table:
    """Return a table of one memory's bytes by cause, the largest first, with bars for shares."""
    used = f"{tier}: {write_bytes(budget.total)} of {write_bytes(budget.limit)}"
    used += f", {write_bytes(reserve)} in reserve" if reserve else ""
    whole = max(budget.limit, budget.total)
    parts = sorted(budget.parts.items(), key=lambda part: -part[1])
    rows = [(part_words(name), write_bytes(size), size / whole) for name, size in parts]
    return bars_table(used, rows or [("nothing", "", 0.0)])


def seconds_table(plan: Plan) -> RenderableType:
    """Return a table of a step's time: compute and copies, tokens per second and MFU."""
    seconds = plan.seconds
    busy = [(name, getattr(seconds, field)) for field, name in LANES.items()]
    waiting = seconds.exposed(overlap=plan.question.overlap)
    busy.append(("waiting, nothing is computed", waiting))
    rows = [(name, write_seconds(time), time / seconds.total) for name, time in busy if time > 0]
    rate = f"{_rate(plan)} tokens/s, MFU {plan.mfu:.1%} ({MFU_CONVENTION})\n"
    if not plan.question.overlap and seconds.fetch + seconds.evict > 0:
        locks = plan.question.machine.pinned
        rate += IN_LINE.format("on a CPU" if locks else "where main memory cannot be locked")
    step = f"step: {write_seconds(seconds.total)}, bound by {BOUND[plan.seconds.bound]}"
    return Group(bars_table(step, rows), Text(rate))


def schedule_view(plan: Plan) -> RenderableType:
    """Return a plan's schedule in words and, if the plan fits, why it was chosen."""
    question, layers = plan.question, most_layers(plan.question)
    of_all = question.model, question.run.tokens, plan.schedule, question.layout
    title = Text("schedule: ")
    title.append(plan.strategy, "bold")
    schedule = stage_schedule(question, plan.schedule)
    lines = list(schedule_words(schedule, layers, len(chunks_of(*of_all))))
    if plan.fits and plan.reason:
        lines.append(f"why: {plan.reason}")
    if plan.gap > 0:
        lines.append(f"at most {write_most(plan.gap)} slower than the best of all schedules")
    indented = Padding(Text("\n".join(lines)), (0, 0, 1, 2), expand=False)
    return Group(title, indented)


def alternatives_table(plan: Plan) -> Table:
    """Return a table that compares a plan with its runners-up."""
    columns = ("strategy", "fits", "step", "device", "host", "chunk", "groups")
    table = lines_table("the choice and its runners-up", *columns, "O kept", "rest kept")
    for other in (plan, *plan.alternatives):
        schedule = stage_schedule(other.question, other.schedule)
        groups = schedule.group_sizes(most_layers(other.question))
        table.add_row(
            other.strategy,
            FITS[other.fit],
            write_seconds(other.seconds.total),
            _share(other.device),
            _share(other.host),
            write_tokens(min(schedule.chunk, other.question.run.tokens)),
            str(len(groups)),
            f"{schedule.attention_save_fraction:.0%}",
            f"{schedule.activation_save_fraction * schedule.activation_save_layers:.0%}",
        )
    return table


def contexts_view(
    plans: Mapping[str, Plan],
    question: Question,
    strategies: Iterable[str],
    max_step: float = math.inf,
) -> RenderableType:
    """Return a table of each strategy's longest context with steps of at most `max_step` seconds.
    A strategy that is not in `plans` has none: it fits at no length."""
    header = f"longest context of {question.model.name}, {devices_words(question)}"
    if not math.isinf(max_step):
        header += f", steps of at most {write_seconds(max_step)}"
    columns = ("strategy", "tokens", "step", "tokens/s", "MFU", "device", "host", "bound by")
    table = lines_table(header, *columns)
    for name, plan in sorted(plans.items(), key=lambda item: -item[1].question.run.tokens):
        table.add_row(
            name,
            write_tokens(plan.question.run.tokens),
            write_seconds(plan.seconds.total),
            _rate(plan),
            f"{plan.mfu:.1%}",
            _share(plan.device),
            _share(plan.host),
            BOUND[plan.seconds.bound],
        )
    for name in strategies:
        if name not in plans:
            table.add_row(name, "none", *[""] * 6)
    return Group(table, Text())


def _rate(plan: Plan) -> str:
    rate = plan.tokens_per_second
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _share(budget: Budget) -> str:
    """Return the used share of a memory's limit as text; the bytes if there is no limit."""
    if budget.limit <= 0:
        return write_bytes(budget.total)
    return f"{budget.total / budget.limit:.0%}"


# -- a step as a trace -----------------------------------------------------------------------------
#
# It has one row for each lane: computing, fetching, evicting, communicating. The format is that of
# Chrome's trace events and of torch.profiler's `export_chrome_trace`, so a measured step and the
# planned one can be opened side by side.
#
# The trace of a plan shows the program of one device and, after it, the update. If copies run in
# line, a lane is idle while another works. No row shows how long pipeline stages wait.

UPDATE = -1  # index of the optimizer's update, which is not an instruction
ROWS = {
    "compute": "compute",
    "fetch": "fetch, host to device",
    "evict": "evict, device to host",
    "collective": "collective, between devices",
    "update": "update of the step before, in main memory",
}
NANOSECOND = 1e-3  # in microseconds, the format's unit: times are rounded to it
MODES = {
    AttentionMode.NONE: " K, V only",
    AttentionMode.GIVEN: " O kept",
    AttentionMode.HELD: " O held",
    AttentionMode.COMPUTE: "",
}


def timeline_json(plan: Plan) -> dict[str, Any]:
    """Return a planned step as a trace of events for JSON. Times are microseconds."""
    program, planned = step_spans(plan)
    about = {
        "model": plan.question.model.name,
        "tokens": plan.question.run.tokens,
        "machine": plan.question.machine.name,
        "strategy": plan.strategy,
        "overlap": plan.question.overlap,
        "predicted_seconds": plan.seconds.total,
        "about": "simulated by farspan plan, not measured",
    }
    return spans_json(((program, span) for span in planned), about)


def spans_json(
    timed: Iterable[tuple[Program, Span]], about: Mapping[str, Any], process: int = 1
) -> dict[str, Any]:
    """Return planned or measured spans of time as a process's trace, with a row for compute and for
    each kind of copy. If a copy begins before the step, all spans are shifted to begin at 0."""
    timed = list(timed)
    early = min((span.start for _, span in timed), default=0.0)
    events = [_event(program, _later(span, -min(early, 0.0)), process) for program, span in timed]
    rows = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": words}}
        for row, words in enumerate(ROWS.values())
    ]
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": rows + events}


def _later(span: Span, seconds: float) -> Span:
    return replace(span, start=span.start + seconds, end=span.end + seconds)


def step_spans(plan: Plan) -> tuple[Program, tuple[Span, ...]]:
    """Return the slowest rank's program and its spans: when each instruction keeps compute or
    copies busy, in seconds from the step's start. The update is last, unless it overlaps the next
    step."""
    question = plan.question
    ranks = [program for _, program in programs(question, plan.schedule)]
    program = ranks[0] if len(ranks) == 1 else slowest(question, size(question, plan.schedule))[0]
    return program, program_spans(plan, program)


def program_spans(plan: Plan, program: Program) -> tuple[Span, ...]:
    """Return the planned spans of time of a rank's program, in seconds from the step's start."""
    question = plan.question
    prices = Prices(question, program, together=question.overlap)
    beside = update_overlaps(question)
    busy = spans(prices, beside=beside) if question.overlap else tuple(_serial_spans(prices))
    end = max((span.end for span in busy), default=0.0)
    update = plan.seconds.optimizer + plan.seconds.beside
    if update:
        when = Span("update", 0.0, update, UPDATE) if beside else None
        busy += (when or Span("compute", end, end + update, UPDATE),)
    return busy


def _serial_spans(prices: Prices) -> Iterator[Span]:
    """Yield the spans of a step without overlap of compute and copies, one after the other."""
    now = 0.0
    for index, instruction in enumerate(prices.program.instructions):
        cost = prices.of(instruction)
        parts = (
            ("fetch", cost.fetch),
            ("compute", cost.compute + cost.host),
            ("collective", cost.collective + _group_seconds(prices, instruction)),
            ("evict", cost.evict),
        )
        for lane, seconds in parts:
            if seconds > 0:
                yield Span(lane, now, now + seconds, index)
                now += seconds


def _group_seconds(prices: Prices, instruction: Instruction) -> float:
    """Return the seconds that collectives take for a group of layers, to gather its weights and to
    reduce its gradients. The trace shows both where the group closes."""
    if not isinstance(instruction, Close):
        return 0.0
    program = prices.program
    layers = range(*program.groups[instruction.group])
    gathers = sum(prices.gather(layer) for layer in layers)
    passes = 1 if instruction.group == program.own_groups()[-1] else 2
    return passes * gathers + prices.reduce(instruction.group)


def _event(program: Program, span: Span, process: int) -> dict[str, Any]:
    """Return a span as an event of the trace format. Start and end are whole nanoseconds, so that
    neighbouring spans meet without overlap."""
    start, end = (round(time * 1e9) for time in (span.start, span.end))
    return {
        "name": span_words(program, span),
        "cat": span.lane,
        "ph": "X",
        "pid": process,
        "tid": tuple(ROWS).index(span.lane),
        "ts": round(start * NANOSECOND, 3),
        "dur": round((end - start) * NANOSECOND, 3),
        "args": {"instruction": span.index},
    }


def span_words(program: Program, span: Span) -> str:
    """Return a span's label in the trace: `F 3.5` is the forward of layer 3, chunk 5."""
    if span.index == UPDATE:
        return "optimizer's update"
    instruction = program.instructions[span.index]
    match instruction:
        case Forward(layer, chunk, mode):
            words = f"F {layer}.{chunk}{MODES[mode]}"
        case Backward(layer, chunk):
            words = f"B {layer}.{chunk}"
        case Fetch(source, _, chunk):
            return f"{source} {chunk}"
        case Evict(_, target, chunk):
            return f"{target} {chunk}"
        case Close(group):
            return f"close group {group}"
        case _:
            where = getattr(instruction, "chunk", None)
            return type(instruction).__name__ + ("" if where is None else f" {where}")
    return words if span.lane == "compute" else f"{span.lane} of {words}"
