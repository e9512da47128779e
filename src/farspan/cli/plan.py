"""`farspan plan`: find out whether a run fits, how long a step takes, and the longest context; and
`farspan init`, which writes a run file. Neither needs torch."""

import gc
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text
from typer.core import TyperCommand

from farspan.ask import HERE, Request
from farspan.cli import FAILED, RUN_FILES, Settings, typer_app
from farspan.cli.train import MeasuringNotes, with_sparse, with_strategy
from farspan.data.config import DataConfig, LossConfig
from farspan.durable import check_place, write_output
from farspan.formatting import (
    as_meant,
    fold,
    read_seconds,
    read_sparse,
    read_tokens,
    write_seconds,
    write_tokens,
)
from farspan.lazy import load
from farspan.planner.machines import count_of, names_card
from farspan.planner.machines import names as machine_names
from farspan.planner.plans import LEAST, best_plan, longest_contexts
from farspan.planner.remedies import LORA, RANK
from farspan.planner.request import Optimizer, Plan, Question
from farspan.profile.catalog import hub_name, presets, split_revision
from farspan.program.strategies import AUTO, STRATEGIES
from farspan.report.plan import (
    FITTING,
    LINES,
    answer_view,
    chosen_words,
    contexts_view,
    drive_json,
    loss_json,
    plan_view,
    timeline_json,
)
from farspan.report.plan_page import PageOf, plan_page
from farspan.report.snapshot import plan_snapshot, write_snapshot
from farspan.report.tables import RUN_FILE, launch_words, plain_lines, show
from farspan.spec import (
    LossKind,
    Objective,
    Quantization,
    Reference,
    Tier,
    UnsupportedError,
    dtype_name,
)
from farspan.train.config import DType, LoraConfig, RunConfig, SparseConfig, built, load_run
from farspan.train.yaml_config import changed, convert, in_k, schedule_mapping, write_mapping


@dataclass(frozen=True, slots=True)
class Longest:
    """Plans for the longest context of each strategy; none for a strategy that never fits."""

    strategies: tuple[str, ...]  # all that were tried
    plans: dict[str, Plan]
    max_step: float = math.inf  # seconds
    shortest: Plan | None = None  # plan at the shortest context, if `plans` is empty

    def best(self) -> Plan | None:
        """Return the plan with the longest context; of equally long ones the fastest."""
        return max(
            self.plans.values(),
            key=lambda plan: (plan.question.run.tokens, -plan.seconds.total),
            default=None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the longest context, overall and by strategy, for JSON; 0 if none fits."""
        best = self.best()
        each = {name: {"fits": False, "max_context": 0} for name in self.strategies}
        for name, plan in self.plans.items():
            each[name] = plan.to_json() | {"max_context": plan.question.run.tokens}
        tokens = 0 if best is None else best.question.run.tokens
        more: dict[str, Any] = {} if math.isinf(self.max_step) else {"max_step": self.max_step}
        if self.shortest is not None:
            more["shortest"] = self.shortest.to_json()
        return {"max_context": tokens, "max_context_by_strategy": each, **more}

    def words(self) -> list[str]:
        """Return, in a list, a line that says that no context fits; empty if some context fits."""
        if (plan := self.shortest) is None:
            return []
        in_time = f"has a step of at most {write_seconds(self.max_step)}"
        verb = in_time if plan.fits else "fits"
        return [f"no context {verb}, not even {write_tokens(plan.question.run.tokens)} tokens"]


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Answer of `farspan plan`: the plan for a context, the longest contexts, or both."""

    question: Question
    plan: Plan | None
    longest: Longest | None
    words: tuple[str, ...] = ()  # about the planned run, printed below its plan
    run: Mapping[str, Any] = field(default_factory=dict)  # the run's part of the JSON
    planned: RunConfig | None = None  # the run of a run file

    def chosen(self) -> Plan | None:
        """Return the plan for the requested context or, without one, for the longest context."""
        if self.plan is not None or self.longest is None:
            return self.plan
        return self.longest.best()

    def to_json(self) -> dict[str, Any]:
        """Return the chosen plan for JSON, and the longest contexts if requested."""
        chosen = self.chosen()
        answer: dict[str, Any] = {"fits": False}
        if chosen is not None:
            more = {**drive_json(chosen.question), **loss_json(chosen)}
            answer = {**chosen.to_json(), **more, **self.run}
        return answer if self.longest is None else answer | self.longest.to_json()

    def show(self, *, everything: bool, after: int = 0, run_file: Path | None = None) -> None:
        """Print the answer, in short or with all details.

        `after` lines follow; `run_file` is the file that is written or was read.
        """
        shown, longest = self.chosen(), self.longest
        words = Text("\n".join(line for said in self.words for line in fold(said)))
        views: list[RenderableType] = [words] * bool(words)
        if longest is not None and longest.plans:
            ways = longest.plans, self.question, longest.strategies, longest.max_step
            views.append(contexts_view(*ways))
        elif longest is not None:
            shown = self.plan or longest.shortest
        assert shown is not None, "the shortest was planned"
        room = LINES - after - sum(len(plain_lines(view)) for view in views)
        first = (
            plan_view(shown) if everything else answer_view(shown, room, str(run_file or RUN_FILE))
        )
        for view in [first, *views] if self.plan is not None else [*views, first]:
            show(view)


def _drawn(answer: PlanAnswer, name: str) -> Plan:
    plan = answer.chosen()
    if plan is None:
        raise UnsupportedError(
            f"{name}: no strategy fits at any context, so there is no step to draw"
        )
    return plan


def write_html(path: Path, answer: PlanAnswer, command: str) -> None:
    """Write an HTML page about all considered plans. Raises UnsupportedError if the folder of
    `path` does not exist."""
    longest, first = answer.longest, answer.plan
    found = PageOf((), words=answer.words, command=command)
    if longest is not None:
        first = first or longest.shortest
        found = replace(found, longest=longest.plans, strategies=longest.strategies)
        found = replace(found, max_step=longest.max_step)
    if first is not None:
        others = (other for other in first.alternatives if first.fits or other.fits)
        found = replace(found, plans=(first, *others))
    write_output(path, plan_page(found), "html")


def write_files(
    answer: PlanAnswer,
    timeline: Path | None,
    snapshot: Path | None,
    html: Path | None,
    command: str,
) -> None:
    """Write the files that options name: the step as a trace, its memory as a PyTorch snapshot, an
    HTML page. Raises UnsupportedError without a plan, or if a folder does not exist."""
    if timeline is not None:
        trace = json.dumps(timeline_json(_drawn(answer, "timeline")))
        write_output(timeline, trace + "\n", "timeline")
    if snapshot is not None:
        memory, note = plan_snapshot(_drawn(answer, "snapshot"))
        write_snapshot(memory, snapshot)
        print(*fold(note), sep="\n", end="\n" * bool(note), file=sys.stderr)
    if html is not None:
        write_html(html, answer, command)


def command_line(context: typer.Context) -> str:
    """Return the command as the user could type it, with options in the order of the help."""
    words = [str(context.command.name)]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or value == parameter.default or value in ([], ()):
            continue
        option = [parameter.opts[0]] if parameter.param_type_name == "option" else []
        for one in value if isinstance(value, list | tuple) else [value]:
            words += option if one is True else [*option, str(one)]
    return f"farspan {shlex.join(words)}"


app = typer_app()

# Options of the machine, or without a key in run files; others change the run.
OF_MACHINE = (
    *("machine", "gpus", "optimizer", "device_memory", "host_memory", "margin"),
    *("loss", "reference"),
)
MODELS = ", ".join(preset.name for preset in presets())
MACHINES = ", ".join(machine_names())
FIELDS = {field.name: field for field in fields(Request) if "help" in field.metadata}
NAMES = {"config": "model"}  # fields of a request with another name on the command line


def option_of(name: str) -> Any:
    """Return the command-line option that sets a field of a request."""
    about = FIELDS[name].metadata
    text = about["help"].replace("{models}", MODELS).replace("{cards}", MACHINES)
    return typer.Option(*about["flags"], metavar=about["metavar"], help=text)


def with_request(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command, which takes `**options`, with an option for each field of `Request`."""
    named = []
    for name, about in FIELDS.items():
        kind: Any = about.metadata["reads"] | None
        option = Annotated[kind, option_of(name)]
        default = HERE if name == "machine" else None
        name = NAMES.get(name, name)
        named.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=option))
    call, run, *others, _ = signature(command).parameters.values()
    taken = [call, run, *named, *(o.replace(kind=Parameter.KEYWORD_ONLY) for o in others)]
    command.__signature__ = Signature(taken)  # type: ignore[attr-defined]
    return command


RunFile = Annotated[
    Path | None,
    typer.Argument(help="Run file (YAML) of `farspan train`; options override its values."),
]
QLora = Annotated[
    bool,
    typer.Option("--qlora", help=f"The same as --lora {RANK} --quantize {Quantization.NF4}."),
]
LongestToo = Annotated[
    bool, typer.Option("--max-context", help="Find the longest context of each strategy.")
]
MaxStep = Annotated[
    str | None,
    typer.Option(help="With --max-context: the longest step to accept: 90s, 30m, 1.5h."),
]
Timeline = Annotated[
    Path | None,
    typer.Option(help="Write the planned step here as a trace that ui.perfetto.dev draws."),
]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        help="Write the memory of the planned step here as a snapshot that "
        "pytorch.org/memory_viz draws."
    ),
]

Html = Annotated[
    Path | None,
    typer.Option(help="Write the answer here as an HTML page that needs no network."),
]

Everything = Annotated[
    bool, typer.Option("--all", help="Print every part, lane, note and runner-up.")
]

WriteRun = Annotated[
    Path | None,
    typer.Option(help="Write a run file here that trains as planned; fill in its data."),
]

FEW_COLLECTIONS = 1_000_000  # new objects between two collections


# Names of options in other tools, which difflib would not find.
ELSEWHERE = {
    "--context": "--seq-len --seqlen --seq --seq-length --sequence-len --sequence-length --ctx "
    "--context-length --max-seq-len --max-seq-length --max-length --tokens --length --cutoff-len",
    "--gpus": "--num-gpus --n-gpus --ngpus --nproc-per-node --devices --num-devices --world-size",
    "--gpu": "--card --device --hardware --accelerator",
    "--strategy": "--gradient-checkpointing --activation-checkpointing --recompute",
    "--disk": "--nvme --ssd --offload-folder",
    "--weights": "--offload-weights --offload-params --offload-param",
    "--batch": "--batch-size --bs --micro-batch-size --per-device-train-batch-size",
    "--device-memory": "--vram --gpu-memory --gpu-mem --memory",
    "--host-memory": "--ram --cpu-memory --main-memory --system-memory",
    "--lora": "--lora-rank --lora-r --rank --peft --adapter --adapters",
    "--quantize": "--nf4 --int4 --load-in-4bit --bits --quantization --quant --4bit --load-in-8bit "
    "--8bit",
    "--dtype bf16 or fp32": "--precision --bf16 --fp16 --fp32 --fp8 --half --mixed-precision "
    "--torch-dtype",
    "--optimizer": "--optim",
    "--optimizer host": "--offload --cpu-offload --zero --zero-stage --offload-optimizer "
    "--deepspeed --fsdp",
    "--loss": "--objective --method --dpo --grpo --kto --orpo",
    "--model": "--model-name-or-path --model-path --base-model --checkpoint",
    "--max-context": "--longest --max-ctx",
    "--html": "--page --output --report",
}
MEANT = {word: name for name, words in ELSEWHERE.items() for word in words.split()}


class PlanCommand(TyperCommand):
    """Command that suggests its own options to users who type those of other tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments as typer does. Suggest farspan's option for another tool's, and the whole
        command for words without options. A bare `--lora` gets the default rank."""
        given = []
        own = [option for parameter in self.get_params(ctx) for option in parameter.opts]
        for place, word in enumerate(args):
            name = word.split("=")[0]
            if name.startswith("--") and name not in (*own, "--"):
                plain = name.lower().replace("_", "-")
                meant = MEANT.get(plain, "")
                if meant.split(" ")[0] not in own:
                    meant = "".join(get_close_matches(plain, own, n=1, cutoff=NEAR))
                if meant and not meant.startswith("-"):  # an argument
                    words = [one.upper() for one in own if not one.startswith("-")]
                    meant = f"farspan {self.name} {' '.join(words)}"
                give = f"give {meant}" if meant else f"farspan {self.name} --help lists all"
                raise UnsupportedError(f"{name}: no such option of farspan {self.name}; {give}")
            given.append(word)
            if word == LORA and all(
                after.startswith("--") for after in args[place + 1 : place + 2]
            ):
                given.append(f"{RANK}")
        ctx.allow_extra_args = True
        rest: list[str] = super().parse_args(ctx, given)
        if rest:
            first = [str(word) for name in FIRST if (word := ctx.params.get(name)) is not None]
            raise UnsupportedError(
                f"{rest[0]}: expected an option before it; give "
                + with_options(str(self.name), first, rest)
            )
        return rest


FIRST = ("run", "model", "data")  # arguments without an option
NEAR = 0.75  # similarity of a mistyped option, above that of merely similar words


def with_options(command: str, arguments: list[str], others: list[str]) -> str:
    """Return a corrected command line: each of `others`, the words typed without an option, follows
    an option that suits it. For `farspan plan qwen3 1M` these are --model and --context."""
    named = []
    if command == "plan":
        arguments, others = [], [*arguments, *others]
    for word in others:
        if SIZE.fullmatch(word.lower()):
            named += ["--context"]
        elif Path(word).suffix not in RUN_FILES:
            named += ["--gpu" if names_card(word) or count_of(word) or word == HERE else "--model"]
        named.append(word)
    return f"farspan {shlex.join([command, *arguments, *named])}"


SIZE = re.compile(r"[\d_,.]+[km]|\d{5,}")  # a context
WORDS = {"strategy", "optimizer", "weights", "loss", "reference"}  # options with fixed values


@app.command("plan", cls=PlanCommand)
@with_request
def plan_command(
    call: typer.Context,
    run: RunFile = None,
    qlora: QLora = False,
    max_context: LongestToo = False,
    max_step: MaxStep = None,
    timeline: Timeline = None,
    snapshot: Snapshot = None,
    html: Html = None,
    write: WriteRun = None,
    settings: Settings = None,
    everything: Everything = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    **options: Any,
) -> None:
    """Predict whether a run fits, its step time and best schedule; exit 1 if it does not fit."""
    # Programs are small objects without cycles: collecting them took 7% of the time.
    gc.set_threshold(FEW_COLLECTIONS)
    options["gpus"] = devices_of(options["gpus"], options["machine"])
    if qlora:
        options["lora"] = options["lora"] or RANK
        options["quantize"] = options["quantize"] or Quantization.NF4
    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: as_meant(str(given[name])) for name in WORDS & given.keys()}
    for option, path in (("timeline", timeline), ("snapshot", snapshot), ("html", html)):
        check_place(path, option)
    check_place(write, "write", new=True)
    answer = _answer(run, settings or (), given, _longest_step(max_step, max_context))
    write_files(answer, timeline, snapshot, html, command_line(call))
    after = [] if html is None else [f"page: {html}"]
    after += [] if write is None else write_run(write, answer, given, command_line(call))
    if as_json:
        print(json.dumps(answer.to_json()))
    else:
        answer.show(everything=everything, after=len(after), run_file=write or run)
    print("\n".join(after), end="\n" * bool(after), file=sys.stderr if as_json else sys.stdout)
    raise typer.Exit(_status(answer))


def _answer(
    run: Path | None, settings: Sequence[str], options: dict[str, Any], longest: float | None
) -> PlanAnswer:
    if run is not None:
        return _answer_for_run(run, settings, options, longest)
    if settings:
        raise UnsupportedError(f"--set {settings[0]}: needs a run file; name one")
    return _answer_for_model(options, longest)


def _status(answer: PlanAnswer) -> int:
    """Return the exit status of an answer: 0 if its plan fits, else 1."""
    chosen = answer.chosen()
    return 0 if chosen and chosen.fits else FAILED


def devices_of(gpus: str | None, machine: str) -> int | None:
    """Return the number of devices from --gpus, or from a machine such as 8xh100. Raises
    UnsupportedError if --gpus names a card."""
    counted = count_of(machine)
    if gpus is None:
        return counted
    named = count_of(gpus)
    if named or not gpus.strip().lstrip("-").isdecimal() or names_card(gpus):
        flags = f"--gpus {named} --gpu CARD" if named else f"--gpu {shlex.quote(gpus)}"
        raise UnsupportedError(
            f"gpus: expected a number of devices, got {gpus!r}; to name a card, give {flags}"
        )
    if counted not in (None, int(gpus)):
        raise UnsupportedError(f"gpus: {gpus}, but {counted} in {machine!r}; give one of the two")
    return int(gpus)


def _longest_step(max_step: str | None, max_context: bool) -> float | None:
    """Return the most seconds per step for --max-context; None without that option."""
    if max_step is None:
        return math.inf if max_context else None
    if not max_context:
        raise UnsupportedError("max_step: needs --max-context; add it, or leave --max-step out")
    return read_seconds(max_step, "max_step")


def _answer_for_model(options: dict[str, Any], max_step: float | None) -> PlanAnswer:
    """Plan the model that the command's options name; with `max_step` (seconds), also find the
    longest contexts."""
    if "model" not in options:
        raise UnsupportedError("model: give --model NAME, or the run file of farspan train")
    if "context" not in options and max_step is None:
        raise UnsupportedError(
            "context: give --context TOKENS, or --max-context to find the longest"
        )
    if "sparse" in options:
        options = {**options, "sparse": read_sparse(options["sparse"])}
    tell = MeasuringNotes()
    fields = {"context": 1, **options, "config": options["model"], "progress": tell}
    del fields["model"]
    request = Request(**fields)
    question, strategies = request.question(), request.strategies()
    plan = best_plan(question, strategies) if "context" in options else None
    longest, words = None, tell.words
    if max_step is not None:
        plans = longest_contexts(question, strategies, max_step=max_step)
        longest = longest_of(question, strategies, plans, max_step)
        words = [*words, *longest.words()]
    return PlanAnswer(question, plan, longest, tuple(words))


def longest_of(
    question: Question, strategies: Sequence[str] | None, plans: dict[str, Plan], max_step: float
) -> Longest:
    """Return the plans for the longest contexts; if no context fits, that for the shortest."""
    shortest = None
    if not plans:
        run = replace(question.run, tokens=LEAST)
        shortest = best_plan(replace(question, run=run), strategies)
    return Longest(tuple(strategies or STRATEGIES), plans, max_step, shortest)


def _answer_for_run(
    path: Path, settings: Sequence[str], options: dict[str, Any], max_step: float | None
) -> PlanAnswer:
    """Plan the run of a run file, with the values of the command's options in place of the file's;
    with `max_step` (seconds), also find the longest contexts."""
    if "model" in options:
        raise UnsupportedError(f"model: {path} has one; leave out --model, or this run file")
    if path.suffix not in RUN_FILES and not path.is_file():
        raise UnsupportedError(
            f"{path}: not a run file (.yaml); to plan a model, give --model {path}"
        )
    run, notes = with_overrides(load_run(path, settings), options)
    asked = {name: options[name] for name in OF_MACHINE if name in options}
    try:
        question_of_run = load("farspan.train.plan_run", "question_of_run")
    except ImportError as error:
        raise UnsupportedError(
            f"{path}: planning a run file needs torch and transformers ({error}); pip install "
            "farspan, which installs both, or give --model and --context instead"
        ) from error
    tell = MeasuringNotes()
    question = question_of_run(run, asked, tell)
    found, longest = question.plan(), None
    if max_step is not None:
        plans = question.longest(max_step)
        longest = longest_of(question.question, question.strategies(), plans, max_step)
        notes += [*without_fields(run), *longest.words()]
    words = (*notes, *missing_data(run), *found.words(), *tell.words)
    return PlanAnswer(found.plan.question, found.plan, longest, words, found.to_json(), found.run)


def missing_data(run: RunConfig) -> list[str]:
    """Return notes about missing files of a run's data, which a plan does not need."""
    notes = []
    for source, _ in run.data.each():
        if source.path not in (None, DATA):
            try:
                load("farspan.data.corpus", "settle")(source)
            except UnsupportedError as error:
                notes.append(f"note: {error}")
    return notes


def with_overrides(run: RunConfig, options: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """Return the run with the values of the command's options in place of its own, and notes about
    values of the run file that therefore no longer apply."""
    notes: list[str | None] = []
    model = run.model
    if "dtype" in options:
        model = replace(model, dtype=DType(dtype_name(options["dtype"])))
    if "lora" in options:
        model = replace(model, lora=_lora(options["lora"]))
    if "quantize" in options:
        model = replace(model, quantize=convert(Quantization, options["quantize"], "quantize"))
    run = replace(run, model=model, batch=options.get("batch", run.batch))
    if "context" in options:
        run = replace(run, context=read_tokens(options["context"], "context"))
    if "strategy" in options:
        run, note = with_strategy(run, options["strategy"])
        notes.append(note)
    if "disk" in options:
        run = replace(run, optimizer=replace(run.optimizer, disk=options["disk"]))
    if "weights" in options:
        own = None if options["weights"] == AUTO else options["weights"]
        weights = convert(Tier | None, own, "weights")
        schedule = replace(run.schedule, weights=weights, weight_gradients=None)
        run = replace(run, schedule=schedule)
    if "sparse" in options:
        run, note = with_sparse(run, read_sparse(options["sparse"]))
        notes.append(note)
    return run, [note for note in notes if note is not None]


def without_fields(run: RunConfig) -> list[str]:
    """Return a note about fields of the run's schedule that --max-context ignores, if any."""
    ignored = ", ".join(replace(run.schedule, weights=None).given())
    return [f"--max-context ignores these fields of the schedule: {ignored}"] if ignored else []


def _lora(rank: int) -> LoraConfig | None:
    try:
        return LoraConfig(rank) if rank else None
    except UnsupportedError as error:
        raise UnsupportedError(f"lora: {error}") from error


# -- from a plan to a run -------------------------------------------------------------------------

DATA, TEACHER = "DATA.jsonl", "TEACHER"  # placeholders for the user's values


def write_run(
    path: Path, answer: PlanAnswer, options: Mapping[str, Any], command: str
) -> list[str]:
    """Write a run file for training as planned, and return lines that say how to go on. Raises
    UnsupportedError for a plan that no run file can express."""
    plan = answer.chosen()
    if plan is None or not plan.fits:
        return [f"{path}: not written, because no plan fits; see the changes above"]
    question = plan.question
    values = run_of_model(plan, options) if answer.planned is None else changed(answer.planned)
    if values.get("folder") == f"runs/{Path(command.split()[2]).stem}":
        del values["folder"]  # each file has its own folder
    tokens = question.run.tokens
    schedule = schedule_mapping(plan.schedule, len(question.model.layers), tokens)
    optimizer = dict(values.get("optimizer", {}), states=STATES.get(question.optimizer, "auto"))
    values |= {"context": in_k(tokens), "schedule": schedule, "optimizer": optimizer}
    built(dict(values), (), str(path))  # check that it can be read
    text = f"# {command}\n# {FITTING[plan.fit]}: {chosen_words(plan)}\n{write_mapping(values)}"
    write_output(path, text, "write")
    start = [f"  farspan train {path}"]
    if question.layout.devices() > 1:
        launch = launch_words(question).partition(", with")[0].replace(RUN_FILE, str(path))
        start = fold(f"  {launch}", indent="  ")
    places = {DATA: "your data's path", TEACHER: "the teacher's folder or hub name"}
    fill = [f"  enter {what} for {w} in {path}" for w, what in places.items() if w in text]
    if "overrides" in values.get("model", {}):
        fill.append(f"  model.overrides in {path} stretches its RoPE to {in_k(tokens)} tokens")
    return [f"{path}: written; next:", *fill, f"  farspan data {path}", *start]


STATES = {Optimizer.ADAMW: "device", Optimizer.ADAMW8BIT: "8bit"}
STATES |= {Optimizer.HOST: "host", Optimizer.DISK: "disk"}


def run_of_model(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file's values for a planned model, except context and schedule. Raises
    UnsupportedError for values that no run file can express."""
    question = plan.question
    if question.optimizer is Optimizer.NONE:
        raise UnsupportedError(
            "write: a run file needs an optimizer, not --optimizer none; leave it out, or in your "
            "own loop use farspan.Step(model, farspan.plan(..., optimizer='none').schedule)"
        )
    name, revision = split_revision(options["model"])
    model: dict[str, Any] = {"path": hub_name("model", name), "dtype": question.dtype}
    model |= {} if revision is None else {"revision": revision}
    model |= {"lora": {"rank": options["lora"]}} if options.get("lora") else {}
    model |= {"quantize": Quantization.NF4.value} if question.nf4 else {}
    longest = question.longest()
    if longest and question.run.tokens > longest and not question.learned_positions():
        stretched = load("farspan.train.plan_run", "stretched_by")
        model |= {"overrides": stretched(options["model"], question.run.tokens)}
    values: dict[str, Any] = {"model": model, "data": {"path": options.get("data", DATA)}}
    if question.loss.is_cut:
        values |= {"loss": changed(loss := loss_of_run(question.loss))}
        values["data"] |= {"format": loss.kind.row.format} if loss.kind.row.format else {}
    values |= {"batch": question.run.batch} if question.run.batch > 1 else {}
    values |= {"margin": options["margin"]} if "margin" in options else {}
    values |= {"parallel": AUTO} if question.layout.devices() > 1 else {}
    if question.sparse is not None:
        values["sparse"] = changed(SparseConfig().over(question.sparse))
    values["optimizer"] = {"disk": options["disk"]} if "disk" in options else {}
    return values


def loss_of_run(objective: Objective) -> LossConfig:
    """Return run-file values for a planned loss. Raises UnsupportedError if there are none."""
    if objective.kind is LossKind.DISTILL:
        return LossConfig(objective.kind, teacher=TEACHER, top_k=objective.ids)
    own = objective.reference not in (Reference.NONE, Reference.STORED)
    try:
        return LossConfig(objective.kind, reference=objective.reference if own else None)
    except UnsupportedError as error:
        raise UnsupportedError(f"write: loss.{error}") from error


init_app = typer_app()


@init_app.command("init", cls=PlanCommand)
def init_command(
    call: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, hub name or preset.")],
    data: Annotated[str, typer.Argument(help="File, folder, glob or hub name.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help=("The run file to write, which must not exist yet.")),
    ] = Path("run.yaml"),
    context: Annotated[str, option_of("context")] = "8K",
    machine: Annotated[str, option_of("machine")] = HERE,
    gpus: Annotated[str | None, option_of("gpus")] = None,
    lora: Annotated[int | None, option_of("lora")] = None,
    quantize: Annotated[str | None, option_of("quantize")] = None,
) -> None:
    """Write a run file for a model and its data, planned for this machine, without prompting."""
    check_place(output, "output", new=True)
    count = devices_of(gpus, machine)
    load("farspan.data.corpus", "settle")(DataConfig(path=data))
    options: dict[str, Any] = {"model": model, "context": context, "machine": machine}
    options |= {"gpus": count, "lora": lora, "quantize": quantize, "data": data}
    given = {name: value for name, value in options.items() if value is not None}
    answer = _answer_for_model(
        {name: value for name, value in given.items() if name != "data"}, None
    )
    chosen = answer.chosen()
    assert chosen is not None, "a context was asked for"
    lines = write_run(output, answer, given, command_line(call))
    answer.show(everything=False, after=len(lines), run_file=output)
    print(*lines, sep="\n")
    raise typer.Exit(0 if chosen.fits else FAILED)
