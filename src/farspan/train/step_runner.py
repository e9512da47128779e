"""Runner that executes batches on the engine: it chooses a schedule, estimates the memory, and
retries after out-of-memory errors."""

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from farspan.data.config import LossConfig
from farspan.data.formats import UNTRAINED
from farspan.data.packing import PackedBatch
from farspan.durable import WriteFailed, read_json, write_whole
from farspan.engine.memory import PeakMemory
from farspan.engine.step import Step
from farspan.program.layout import group_ranges
from farspan.report.run import ABOUT
from farspan.spec import LossKind, Products, Tier, UnsupportedError
from farspan.train.context import RunContext
from farspan.train.memory import (
    Expected,
    describe_expected,
    describe_measured,
    describe_resident,
    show_bytes,
)
from farspan.train.observer import Observer
from farspan.train.oom import (
    NoScheduleFits,
    OneRankOutOfMemory,
    Shortage,
    clear_up,
    find_shortage,
)
from farspan.train.planning import (
    PLAN,
    Choice,
    SchedulePolicy,
    about_json,
    cells_of,
    choice_json,
    describe_schedule,
)
from farspan.train.record import (
    STEP,
    StepRecorder,
    drawn_json,
    memory_json,
    planned_json,
    trace_json,
)
from farspan.train.run_folder import RunFolder, RunState, restore_rng
from farspan.train.sparse import HIDING_NOTHING, SPARSELY, hides, marks, other_chunk
from farspan.train.yaml_config import as_yaml, to_mapping

T = TypeVar("T")
P = ParamSpec("P")

RETRIES = 4  # retries of the same work


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The memory and time that a plan predicted, with the measured values."""

    predicted_bytes: int  # of tensors, without the reserve; on a CPU both tiers together
    measured_bytes: int
    predicted_seconds: float  # per update
    measured_seconds: float | None  # the median, without the first step, which is metered

    def describe(self) -> str:
        measured = self.measured_seconds
        seconds = "not" if measured is None else f"{measured:,.3f} s"
        return (
            f"plan: {show_bytes(self.predicted_bytes)} predicted, "
            f"{show_bytes(self.measured_bytes)} measured; "
            f"a step in {self.predicted_seconds:,.3f} s predicted, {seconds} measured"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Outcome of a run, for its caller and the command line."""

    folder: Path
    step: int  # updates done
    steps: int  # updates that the run file asks for
    loss: float | None = None  # of the last step that was not skipped
    heldout_loss: float | None = None  # the latest held-out loss
    skipped: int = 0  # steps without an update, because a value was not finite
    signum: int | None = None  # the signal that ended the run early
    stopped: str | None = None  # reason to end before the last step, other than a signal
    uploaded: str | None = None  # address of the commit on the hub
    not_uploaded: str | None = None  # reason for a failed upload
    best: int | None = None  # step of the exported model, if it is the best checkpoint's
    comparison: PlanComparison | None = None  # the planner's predictions and the measurements
    sparse: bool = False  # trained and evaluated with sparse attention
    hides: bool = True  # sparse attention may hide tokens that dense attention sees
    products: Products | None = None  # trained with approximate linear products
    leads: bool = True  # this process prints the result
    adapters: bool = False  # only adapters were trained and exported

    @property
    def exit_code(self) -> int:
        """Exit code for the shell: 0, 128 plus a signal's number, or 1 after a failed upload."""
        return int(self.not_uploaded is not None) if self.signum is None else 128 + self.signum

    @property
    def message(self) -> str:
        """Outcome as one sentence for the user."""
        words = SPARSELY if self.hides else HIDING_NOTHING
        how = f" {words}" if self.sparse else ""
        if self.products is not None:
            how += f" with products in {self.products}, an approximation"
        if self.signum is not None:
            return (
                f"{signal.Signals(self.signum).name}: stopped after step {self.step} of "
                f"{self.steps}{how}; run the same command again to resume from there"
            )
        what = "adapters" if self.adapters else "model"
        done = f"{self.steps} steps done{how}"
        if self.stopped is not None:
            done = f"stopped after step {self.step} of {self.steps}{how}: {self.stopped}"
        of = "" if self.best is None else f" of step {self.best}, the best on held-out text,"
        verb = "are" if self.adapters else "is"
        there = f", and at {self.uploaded}" if self.uploaded is not None else ""
        lacks = f"; {self.not_uploaded}" if self.not_uploaded is not None else ""
        return f"{done}; the {what}{of} {verb} in {self.folder / 'model'}{there}{lacks}"


class StepRunner:
    """Owner of the engine, a `farspan.Step` that is made when it is first needed.

    Invariant: a returned result was computed by one schedule from beginning to end.
    """

    def __init__(
        self,
        ctx: RunContext,
        policy: SchedulePolicy,
        state: RunState,
        folder: RunFolder,
        observer: Observer,
    ) -> None:
        self._ctx = ctx
        self._policy = policy
        self._state = state
        self._folder = folder
        self._observer = observer
        self._choice: Choice | None = None
        self._expected: Expected | None = None
        self._step: Step | None = None
        self._process_peak = 0  # bytes, before `forget_peak`
        self._resident = 0  # peak bytes of the first two steps, on a CPU
        self._planned = 0  # planned bytes of the process
        self._peak: int | None = None  # bytes of a step without weights and optimizer
        self._measured: dict[str, int] = {}  # values for the next line of metrics.jsonl
        self._seconds: list[float] = []  # of whole steps after the metered one
        self._recorder: StepRecorder | None = None  # of the current update, if it is recorded
        self._known: dict[str, Any] = {}  # content of step.json
        self._place = 0  # index of the drawn program among those of an update
        self._is_timed = False  # an unmetered step was recorded

    def make_ready(self) -> None:
        """Choose a schedule and make the engine for it. Raises UnsupportedError, Interrupted."""
        self.attempt(_nothing)

    def attempt(
        self, work: Callable[Concatenate[Step, P], T], *given: P.args, **named: P.kwargs
    ) -> T:
        """Return `work(engine, ...)`; after out-of-memory errors, try again with schedules that
        take less memory. Raises NoScheduleFits."""
        tried: list[str] = []
        while True:
            try:
                return work(self._ready(), *given, **named)
            except (RuntimeError, MemoryError, UnsupportedError) as error:
                shortage = find_shortage(error)
                if shortage is None:
                    raise
                if self._ctx.world.size > 1 and not shortage.of_all:
                    raise self._leave(shortage) from error
            # Outside the handler: the exception keeps the step's frames and their tensors alive.
            self._give_up(shortage, tried)

    @contextmanager
    def metering(self) -> Iterator[None]:
        """Measure the step inside the block: in a schedule's first step the peak bytes, in its
        second the seconds of each instruction, later nothing."""
        if not self._seconds and self._ctx.device.type == "cpu":
            self._process_peak = max(self._process_peak, forget_peak())
        if self._peak is not None:
            with nullcontext() if self._is_timed else self._recording(None):
                yield
            return
        with PeakMemory(self._ctx.device) as meter, self._recording(meter):
            yield
        assert self._expected is not None, "work is done with what was sized"
        self._peak = meter.peak
        self._measured = {
            "memory_predicted_bytes": self._expected.new,
            "memory_measured_bytes": meter.peak,
        }
        self._observer.note(describe_measured(self._expected.new, meter.peak))

    def peak_process_bytes(self) -> int:
        """Return the peak of the main memory that the whole process used."""
        return max(self._process_peak, peak_resident_bytes())

    @contextmanager
    def _recording(self, meter: PeakMemory | None) -> Iterator[None]:
        """Record the instructions of the step inside the block, on ranks that write a record."""
        step = self._step
        assert step is not None, "work is done with a step"
        traced = self._observer.trace is not None
        if traced or self._ctx.world.is_rank0:
            copies = step.copies if traced else None
            if copies is not None:
                copies.timed = []
            self._recorder = StepRecorder(self._ctx.device, self._ctx.gradient_bytes, meter, copies)
            step.watch = self._recorder.follow
        try:
            yield
        finally:
            step.watch = None

    def updating(self) -> AbstractContextManager[None]:
        """Return a context that times the optimizer's update, if the step is recorded."""
        return nullcontext() if self._recorder is None else self._recorder.updating()

    def took(self, seconds: float) -> dict[str, int]:
        """Note the seconds of a finished step and write its records. Returns predicted and measured
        peak bytes for metrics.jsonl after a schedule's first step (on a CPU also its second), later
        an empty mapping."""
        found, self._measured = self._measured, {}
        metered = bool(found)
        if not self._seconds and self._ctx.device.type == "cpu":
            found |= self._look_at_process(found.get("memory_predicted_bytes"))
        if not metered:
            self._seconds.append(seconds)
        recorder, self._recorder = self._recorder, None
        if recorder is not None and recorder.walks:
            recorder.finish()
            if self._ctx.world.is_rank0:
                self._write_step(recorder, seconds)
            if self._observer.trace is not None:
                self._write_trace(recorder, seconds, self._observer.trace)
        self._is_timed = self._is_timed or not metered
        return found

    def _look_at_process(self, predicted: int | None) -> dict[str, int]:
        """Return planned and peak bytes of the process for metrics.jsonl. Called after each of the
        first two steps on a CPU: the first writes most gradients and states only after its peak.
        `predicted` is the step's predicted bytes, None in the second step."""
        self._resident = max(self._resident, peak_resident_bytes() - self._ctx.outside)
        if predicted is not None:
            self._planned = self._ctx.held_bytes() + predicted
        if predicted is None or self._state.at.step == self._ctx.run.steps:
            self._observer.note(describe_resident(self._planned, self._resident))
        return {"memory_planned_bytes": self._planned, "memory_resident_bytes": self._resident}

    def _write_step(self, recorder: StepRecorder, seconds: float) -> None:
        ctx, choice, expected = self._ctx, self._choice, self._expected
        assert choice is not None, "a step was done"
        assert expected is not None, "it was sized"
        if recorder.meter is not None and self._peak is not None:
            self._place = recorder.highest()
        walk, known = recorder.walks[min(self._place, len(recorder.walks) - 1)], self._known
        at, known["drawn"] = drawn_json(walk)
        program = walk.program
        known["grid"] = {"layers": len(program.model.layers), "chunks": len(program.chunks)}
        step = {"step": self._state.at.step}
        if recorder.meter is not None and self._peak is not None:
            held, peak = ctx.held_parts(), self._peak
            known["memory"] = step | memory_json(walk, at, expected, held, peak, ctx.device)
            plan = choice.plan
            if plan is not None and ctx.run.model.dtype in plan.question.machine.rates:
                known["planned"] = planned_json(plan, program, ctx.run.accumulate)
        known["seconds"] = {
            **step,
            "metered": recorder.meter is not None,
            "total": seconds,
            "parts": recorder.seconds(),
        }
        self._folder.write_json(STEP, known)

    def _write_trace(self, recorder: StepRecorder, seconds: float, path: Path) -> None:
        """Write the trace of the recorded step. It replaces that of the schedule's first step,
        whose times include metering. A trace that cannot be written does not end the run."""
        launch, step = self._ctx.world.launch, self._state.at.step
        rank = 0 if launch is None else launch.rank
        about = {
            "tokens": self._ctx.run.context,
            "device": str(self._ctx.device),
            "step": step,
            "seconds": seconds,
        }
        if rank:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        text = json.dumps(trace_json(recorder, rank, about))
        if recorder.copies is not None:
            recorder.copies.timed = None
        try:
            write_whole(path, text.encode())
        except WriteFailed as error:
            self._observer.note(f"the trace of step {step} was not written: {error}")
            return
        self._observer.note(f"trace: step {step} is in {path}; ui.perfetto.dev draws it")

    def compare(self) -> PlanComparison | None:
        """Return the plan's predictions and the measurements, or None if either is missing."""
        ctx, plan = self._ctx, self._choice.plan if self._choice else None
        if plan is None or self._peak is None:
            return None
        on_cpu = ctx.device.type == "cpu"
        update = plan.seconds.optimizer
        return PlanComparison(
            predicted_bytes=plan.device.total
            - plan.device.parts.get("reserve", 0)
            + (plan.host.total if on_cpu else 0),
            measured_bytes=ctx.held_bytes() + self._peak,
            predicted_seconds=(plan.seconds.total - update) * ctx.run.accumulate + update,
            measured_seconds=median(self._seconds) if self._seconds else None,
        )

    def _ready(self) -> Step:
        """Return the engine for the schedule. Raises TooLarge if its memory does not fit."""
        ctx, run = self._ctx, self._ctx.run
        if self._choice is None:
            self._choice = self._policy.first()
            text = f"schedule: {self._described(self._choice)}{_because(self._choice)}"
            self._observer.note(text)
        if self._step is None:
            self._step = ctx.make_step(self._choice.schedule)
            self._expected = None
        if self._expected is None:
            self._expected = ctx.components.expect_memory(
                self._step,
                run.batch,
                run.context,
                ctx.optimizer.held(),
                cells_of(ctx, self._choice),
                **_values_of(run.objective),
            )
            self._observer.note(describe_expected(self._expected))
            self._write_about(self._choice, self._expected)
        return self._step

    def _write_about(self, choice: Choice, expected: Expected) -> None:
        """Write about.json, and plan.json if the planner chose the schedule."""
        path = self._folder.path / ABOUT
        known = (read_json(path, schedule=dict) or {}) if self._state.at.step else {}
        if words := other_chunk(known.get("schedule", {}).get("chunk"), choice.schedule):
            self._observer.note(f"schedule: {words}")
        self._folder.write_json(ABOUT, about_json(self._ctx, choice, expected))
        if choice.plan is not None:
            self._folder.write_json(PLAN, self._found_again(choice))
            self._folder.forget_shortage()

    def _described(self, choice: Choice) -> str:
        """Return the schedule as one line of text. In a pipeline it shows the ranks' stages instead
        of the schedule's groups of layers."""
        sharded_model, schedule = self._ctx.sharded_model, choice.schedule
        if sharded_model is not None and sharded_model.ranks.layout.pipeline > 1:
            stages = group_ranges(
                schedule, len(sharded_model.spec.layers), sharded_model.ranks.layout.pipeline
            )
            sizes = tuple(last - first for first, last in stages)
            choice = replace(choice, schedule=replace(schedule, groups=sizes))
        return describe_schedule(choice, hides=hides(self._ctx.run))

    def _found_again(self, choice: Choice) -> dict[str, Any]:
        asked = self._ctx.components.schedule_of(self._ctx.run, self._ctx.model)
        return choice_json(choice, asked, self._ctx.world.layout)

    def _leave(self, shortage: Shortage) -> OneRankOutOfMemory:
        """Write shortage.json, and return the error for a rank that runs out of memory alone. The
        rank cannot retry the step, since the other ranks still wait for messages from it."""
        ctx, choice = self._ctx, self._choice
        advice = "with a smaller schedule, if there is one"
        if choice is not None:
            # The next start takes less. If the disk is full too, the first error is reported.
            with suppress(WriteFailed):
                known = self._found_again(choice) | shortage_json(shortage, choice)
                self._folder.write_shortage(known)
        if choice is not None and choice.plan is not None:
            advice = "with a smaller plan"
        elif choice is not None and ctx.sharded_model is not None:
            try:
                found = self._policy.lighter(choice, shortage).schedule
            except UnsupportedError:
                advice = "(start more ranks: no schedule needs less memory)"
            else:
                layers = len(ctx.sharded_model.spec.layers)
                advice = f"with {as_yaml(found, layers, ctx.run.context)}"
        return OneRankOutOfMemory(
            f"out of memory ({_tier_words(shortage.tier, ctx)}): {shortage.message}. Other ranks "
            "are still within the step, so this rank cannot retry it. Run the same command again: "
            f"it resumes from the latest checkpoint {advice}"
        )

    def _give_up(self, shortage: Shortage, tried: list[str]) -> None:
        """Free the failed step's memory, and choose the next schedule. Raises NoScheduleFits."""
        ctx = self._ctx
        if self._step is not None:
            self._step.release()
        self._step, self._peak, self._measured, self._seconds = None, None, {}, []
        self._recorder, self._known, self._is_timed, self._resident = None, {}, False, 0
        ctx.optimizer.clear()
        restore_rng(self._state.rng, ctx.device)
        clear_up(ctx.device)
        if self._choice is None:  # before any schedule
            raise NoScheduleFits(f"memory: {shortage.message}")
        tried.append(f"{self._described(self._choice)}: {shortage.message}")
        if len(tried) > RETRIES:
            raise NoScheduleFits(f"memory: ran out with{_listed(tried)}\nshorten the context")
        try:
            choice = self._policy.again(self._choice, shortage)
        except UnsupportedError as error:
            raise NoScheduleFits(f"memory: ran out with{_listed(tried)}\nthen {error}") from None
        self._observer.note(
            f"out of memory ({_tier_words(shortage.tier, ctx)}): {shortage.message}\n"
            f"retry {len(tried)} of {RETRIES} with {self._described(choice)}"
            f"{_because(choice)}{_sees_otherwise(self._choice, choice)}"
        )
        self._record(shortage, choice)
        self._choice = choice

    def _record(self, shortage: Shortage, choice: Choice) -> None:
        """Write the memory error and the next schedule to metrics.jsonl and about.json."""
        if self._ctx.memory.forget is not None:
            self._ctx.memory.forget()
        line = {"step": self._state.at.step + 1, **marks(self._ctx.run)}
        self._folder.record(line | shortage_json(shortage, choice))
        known = read_json(self._folder.path / ABOUT) or {}
        self._folder.write_json(ABOUT, known | {"schedule": asdict(choice.schedule)})


def shortage_json(shortage: Shortage, choice: Choice) -> dict[str, Any]:
    """Return an out-of-memory error and the next schedule as values for metrics.jsonl."""
    return {
        "out_of_memory": shortage.tier.value,
        "message": shortage.message,
        "schedule": to_mapping(choice.schedule),
    }


def _values_of(loss: LossConfig) -> dict[str, Any]:
    """Return, as keyword `values`, how many log-probabilities a loss keeps per token; {}: none."""
    if loss.kind is LossKind.SFT:
        return {}
    return {"values": loss.top_k if loss.kind is LossKind.DISTILL else 1}


def _nothing(step: Step) -> None:
    """Do no work: `attempt(_nothing)` only makes the engine."""


def _because(choice: Choice) -> str:
    return f" ({choice.reason})" if choice.reason else ""


def _sees_otherwise(before: Choice, now: Choice) -> str:
    words = other_chunk(before.schedule.chunk, now.schedule)
    return f"; {words}" if words else ""


def _tier_words(tier: Tier, ctx: RunContext) -> str:
    return "main memory" if ctx.device.type == "cpu" else tier.value


def _listed(tried: list[str]) -> str:
    """Return the failed attempts, one per line, so that their differences are easy to see."""
    return "".join(f"\n  ({place}) {text}" for place, text in enumerate(tried, start=1))


# -- batches ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Micro:
    """One batch on the device, with the number of tokens that have a target."""

    batch: PackedBatch
    indices: tuple[int, ...]
    input_ids: Tensor  # [batch, tokens] int64
    labels: Tensor  # the same shape and dtype; UNTRAINED for no target
    document_ids: Tensor  # [batch, tokens] int64
    trained: int

    @property
    def attention_mask(self) -> Tensor:
        """False for padding, [batch, tokens]."""
        lengths = torch.tensor(self.batch.lengths, device=self.input_ids.device)
        places = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return places < lengths[:, None]

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"sequence": index, "documents": list(names)}
            for index, names in zip(self.indices, self.batch.names, strict=True)
        ]


class Batches:
    """Batches of a run, in order. Batch n of all D replicas together holds the sequences from n * B
    to (n + 1) * B, with B = D * batch: an update reads the same as one replica with batch B."""

    def __init__(self, ctx: RunContext) -> None:
        self.ctx = ctx
        self.replicas, self.replica = ctx.world.replicas, ctx.world.replica

    def of_step(self, step: int) -> list[Micro]:
        """Return this replica's batches of step `step`, counted from 0."""
        count = self.ctx.run.accumulate
        return [self.of(step * count + place) for place in range(count)]

    def needed(self) -> int:
        """Return how many different batches this replica reads: those of all its steps, but at most
        those of an epoch, which then repeats."""
        run = self.ctx.run
        epoch = self.ctx.corpus.sequences_per_epoch()
        assert epoch is not None, "stored log-probabilities are of data that is no stream"
        epoch = -(-epoch // (run.batch * self.replicas))
        return min(run.steps * run.accumulate, epoch)

    def held_out(self) -> list[Micro]:
        """Return this replica's batches for evaluation, spread over all held-out sequences so that
        one long document does not dominate. Every replica gets the same number of batches; those
        added to reach it have no token with a target."""
        packing, replicas, chosen = self.ctx.corpus.held_out, self.replicas, self.evaluated()
        assert packing is not None
        count, own = len(chosen), chosen[self.replica :: replicas]
        found = [self.place(packing.once(i), (i,)) for i in own]
        for _ in range(-(-count // replicas) - len(own)):
            spare = self.place(packing.once(chosen[-1]), (chosen[-1],))
            labels = torch.full_like(spare.labels, UNTRAINED)
            blank = replace(spare.batch, pairs=(), answers=())
            found.append(replace(spare, batch=blank, labels=labels, trained=0))
        return found

    def evaluated(self) -> list[int]:
        """Return the indices of the held-out sequences that all replicas evaluate, in order."""
        assert self.ctx.corpus.held_out is not None, "there is something to evaluate on"
        there = self.ctx.corpus.held_out.sequences_per_epoch()
        count = min(self.ctx.run.evaluation.sequences, there)
        return [place * there // count for place in range(count)]

    def before(self, index: int, own: int, part: str) -> PackedBatch:
        """Return the sequence before sequence `index` in an update or in the evaluation of all
        replicas, `[1, context]`; before the first one is the last. Where that ends with answer
        `own`, as one of the last epoch may, return another. Raises UnsupportedError if all do."""
        run, corpus = self.ctx.run, self.ctx.corpus
        held = corpus.held_out if part == "held_out" else None
        size = run.batch * run.accumulate * self.replicas
        first, epoch = index // size * size, corpus.sequences_per_epoch() or size
        chosen, more = [*range(first, first + size)], range(first + size, first + size + epoch)
        if held is not None:
            chosen, more = self.evaluated(), range(held.sequences_per_epoch())
        for other in (*chosen[chosen.index(index) - 1 :: -1], *chosen[::-1], *more):
            found = corpus.train.batch([other]) if held is None else held.once(other)
            if found.answers[0][-1].number != own:
                return found
        raise UnsupportedError(
            f"data.{'path' if held is None else part}: kto pairs each answer with another's "
            "prompt, and there is one answer alone; give more records"
        )

    def trained(self, micros: list[Micro]) -> int:
        """Return the number of tokens with a target in these batches, over all replicas."""
        return self.over_replicas(sum(m.trained for m in micros))

    def read(self, micros: list[Micro]) -> int:
        """Return the number of document tokens in these batches, over all replicas."""
        return self.over_replicas(sum(m.batch.tokens for m in micros))

    def over_replicas(self, number: int) -> int:
        """Return the sum over all replicas of a number that each replica passes."""
        return number if self.replicas == 1 else self.ctx.world.sum_over_replicas(number)

    def of(self, number: int) -> Micro:
        """Return this replica's batch `number`, counted from the start of the run."""
        size = self.ctx.run.batch
        start = (number * self.replicas + self.replica) * size
        indices = tuple(range(start, start + size))
        return self.place(self.ctx.corpus.train.batch(indices), indices)

    def place(self, batch: PackedBatch, indices: tuple[int, ...]) -> Micro:
        """Return a batch on the device, with these indices of its sequences."""
        input_ids = torch.from_numpy(batch.input_ids).to(self.ctx.world.device)
        labels = torch.from_numpy(batch.labels).to(self.ctx.world.device)
        document_ids = torch.from_numpy(batch.document_ids).to(self.ctx.world.device)
        trained = self.ctx.components.count_trained(labels, document_ids)
        return Micro(batch, indices, input_ids, labels, document_ids, trained)


def peak_resident_bytes() -> int:
    """Return the peak main memory of the process since its start or the last `forget_peak`."""
    # The kernel counts kibibytes on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> int:
    """Return `peak_resident_bytes()`, and reset that peak (on Linux only)."""
    found = peak_resident_bytes()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return found
