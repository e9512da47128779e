"""Training from a RunConfig to a model on disk; the same call again resumes."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from farspan.distributed.launch import launch_env
from farspan.durable import read_json
from farspan.sparse.train import HIDING_NOTHING, SPARSELY, hides, what_changes
from farspan.train.config import RunConfig
from farspan.train.crew import Crew, crew_of
from farspan.train.folder import OthersFolder, RunFolder
from farspan.train.interrupt import Interrupt, Interrupted
from farspan.train.optimizer_place import STATES
from farspan.train.parts import Parts, remembered
from farspan.train.planning import place_states
from farspan.train.progress import NoReporter, Reporter, make_reporter
from farspan.train.runner import Comparison
from farspan.train.setup import choose_device, equip, introduce, resolve
from farspan.train.trackers import make_trackers
from farspan.train.tracking import Lane, Tracked
from farspan.train.trainer import ABOUT, Trainer


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int  # updates done
    steps: int  # updates asked for
    loss: float | None  # of the last step that was not skipped
    heldout_loss: float | None  # the latest
    skipped: int  # steps without an update, because something was not finite
    signum: int | None  # the signal that ended it early
    comparison: Comparison | None = None  # of the planner's plan with what happened
    sparse: bool = False  # by sparse attention, the held-out losses too: an approximation if
    hides: bool = True  # a query may miss what dense attention shows it
    leads: bool = True  # this process is the one that tells of it
    adapters: bool = False  # are what was trained, and is given out

    @property
    def exit_code(self) -> int:
        """For the shell: 0, or 128 and the signal's number."""
        return 0 if self.signum is None else 128 + self.signum

    @property
    def message(self) -> str:
        """One sentence for the user."""
        words = SPARSELY if self.hides else HIDING_NOTHING
        how = f" {words}" if self.sparse else ""
        if self.signum is not None:
            return (
                f"{signal.Signals(self.signum).name}: stopped after step {self.step} of "
                f"{self.steps}{how}; run the same command again to go on from there"
            )
        what = "adapters are" if self.adapters else "model is"
        return f"{self.steps} steps done{how}; the {what} in {self.folder / 'model'}"


def train(
    run: RunConfig,
    *,
    parts: Parts | None = None,
    reporter: Reporter | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """Trains until the last step or the first signal, from the latest checkpoint if there is one.

    `notes` are said first. Raises Refused for what cannot be done as asked, OutOfMemory (which is
    one) when no schedule fits, WriteFailed when the disk is full, Diverged when a loss or gradient
    is not finite; all of them leave the last good checkpoint. Where torchrun started several
    processes, or in a process group, all of them call this and have the same result; then also
    RankFailed, which names another rank that failed.
    """
    place = launch_env()
    run = resolve(run, None if place is None else place.ranks)
    with crew_of(run, place, choose_device(run.device)) as crew:
        lanes: list[Lane] = []
        crew.by_first(lambda: lanes.extend(Lane(*named) for named in make_trackers(run).items()))
        if crew.leads:
            shown = make_reporter(Console()) if reporter is None else reporter
            shown = Tracked(shown, lanes) if lanes else shown
            with RunFolder(run) as folder, Interrupt() as interrupt, shown:
                return _train(run, parts or Parts(), folder, (shown, interrupt), crew, notes)
        with OthersFolder(run) as folder, Interrupt() as interrupt:
            told = NoReporter(), interrupt
            return _train(run, parts or Parts(), folder, told, crew, notes)


def _train(
    run: RunConfig,
    parts: Parts,
    folder: RunFolder,
    person: tuple[Reporter, Interrupt],
    crew: Crew,
    notes: Sequence[str],
) -> Result:
    shown, interrupt = person
    interrupt.share(crew)
    for text in notes:
        shown.note(text)
    for change in crew.by_first(folder.prepare):
        shown.note(f"{change}: {what_changes(run, change)}")
    try:
        trainer = _prepare(run, parts, folder, shown, interrupt, crew)
    except Interrupted as stop:
        return replace(_nothing(run, folder), signum=stop.signum)
    try:
        trainer.fit()
    except Interrupted as stop:
        trainer.save()
        return _result(run, folder, trainer, stop.signum)
    comparison = trainer.compare()
    trainer.export()
    return replace(_result(run, folder, trainer, None), comparison=comparison)


def _prepare(
    run: RunConfig,
    parts: Parts,
    folder: RunFolder,
    reporter: Reporter,
    interrupt: Interrupt,
    crew: Crew,
) -> Trainer:
    def watch(documents: int, tokens: int) -> None:
        interrupt.check()
        reporter.preparing(documents, tokens)

    def measuring(what: str) -> None:
        interrupt.check()
        reporter.measuring(what)

    before = crew.by_first(lambda: read_json(folder.path / ABOUT) or {}).get(STATES)
    parts = replace(parts, machine=remembered(parts.machine))
    place = place_states(run, parts, before, measuring, crew)
    equipment = equip(run, parts, watch, place, crew)
    reporter.note(introduce(run, equipment))
    trainer = Trainer(run, equipment, parts, folder, reporter, interrupt)
    trainer.resume()
    if trainer.at.step and before not in (None, equipment.placed.states):
        reporter.note(f"optimizer states: were on the {before}; the same tensors go on elsewhere")
    return trainer


def _nothing(run: RunConfig, folder: RunFolder) -> Result:
    """Of a run that ended before it began."""
    return Result(
        *(folder.path, 0, run.steps, None, None, 0, None),
        sparse=run.sparse is not None,
        hides=hides(run),
        leads=not isinstance(folder, OthersFolder),
        adapters=run.model.lora is not None,
    )


def _result(run: RunConfig, folder: RunFolder, trainer: Trainer, signum: int | None) -> Result:
    held_out = trainer.held_out
    return replace(
        _nothing(run, folder),
        step=trainer.at.step,
        loss=trainer.loss,
        heldout_loss=held_out[max(held_out)] if held_out else None,
        skipped=trainer.at.skipped,
        signum=signum,
    )
