"""The command line. The module of a command is imported only when the command is called, so that
help and planning need no torch."""

import codecs
import errno
import io
import logging
import os
import sys
import unicodedata
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from farspan.durable import WriteFailed
from farspan.formatting import fold
from farspan.lazy import load
from farspan.spec import VERSION, UnsupportedError

RUN_FILES = (".yaml", ".yml")
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the run file to a value (YAML), such as optimizer.lr=1e-5 or "
        "schedule=auto; may be repeated.",
    ),
]
USAGE, FAILED = 2, 1  # exit codes: the request is invalid; the command ran and failed


def typer_app(*, completion: bool = False, **options: Any) -> typer.Typer:
    """Return a typer application that shows plain Python tracebacks."""
    return typer.Typer(add_completion=completion, pretty_exceptions_enable=False, **options)


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported when called: its module, and the first line of its help."""

    module: str
    help: str
    app: str = "app"  # name of the application in the module


def lazy_group(
    commands: dict[str, LazyCommand],
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> typer.Typer:
    """Return an application that lists commands with their help, and imports only the module of the
    called one. Parsing and running happen inside the context that `within` returns."""

    class LazyGroup(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> Any:
            with within():
                return super().parse_args(ctx, args)

        def invoke(self, ctx: Any) -> Any:
            with within():
                return super().invoke(ctx)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """Return the called command from its module, and the remaining arguments."""
            name, _, rest = super().resolve_command(ctx, args)
            called = commands[str(name)]
            return name, typer.main.get_command(load(called.module, called.app)), rest

    app = typer_app(cls=LazyGroup, **options)
    for name, command in commands.items():
        app.command(name, help=command.help)(lambda: None)
    return app


COMMANDS = {
    "train": LazyCommand(
        "farspan.cli.train",
        "Train a model; the same command again resumes from the latest checkpoint.",
    ),
    "plan": LazyCommand(
        "farspan.cli.plan",
        "Predict whether a run fits, its step time and best schedule; exit 1 if it does not fit.",
    ),
    "init": LazyCommand(
        "farspan.cli.plan",
        "Write a run file for a model and its data, planned for this machine, without prompting.",
        "init_app",
    ),
    "verify": LazyCommand(
        "farspan.cli.verify",
        "Compare loss and every gradient with plain full-sequence autograd; exit 1 if they differ.",
    ),
    "index": LazyCommand(
        "farspan.cli.verify",
        "Train on a text the index by which sparse attention, `selector: index`, chooses pages.",
        app="index_app",
    ),
    "evaluate": LazyCommand(
        "farspan.cli.evaluate",
        "Measure loss by position, perplexity by document, and recall of hidden sentences.",
    ),
    "report": LazyCommand(
        "farspan.cli.train",
        "Write one HTML page on one or several runs: curves, memory, time, order of the work.",
        app="report_app",
    ),
    "data": LazyCommand(
        "farspan.cli.train",
        "Show a run file's sequences: which documents, and which of their tokens are trained.",
        app="data_app",
    ),
    "merge": LazyCommand(
        "farspan.cli.train",
        "Merge a run's adapters into their base model; transformers loads the result.",
        app="merge_app",
    ),
    "push": LazyCommand(
        "farspan.cli.train",
        "Upload a run's model, with a card that says how it was trained, to the Hugging Face hub.",
        app="push_app",
    ),
    "calibrate": LazyCommand(
        "farspan.cli.calibrate",
        "Measure this machine and write the file that `farspan plan` reads.",
    ),
    "profile": LazyCommand(
        "farspan.cli.calibrate",
        "Measure the costs of a model, which `farspan plan` reads; no weights, on any machine.",
        "profile_app",
    ),
    "memory": LazyCommand(
        "farspan.cli.memory",
        "Trace a step's memory, plan addresses for it, compare allocators on it.",
    ),
}

app = lazy_group(
    COMMANDS,
    help="Train Hugging Face language models on sequences far longer than memory, exactly.",
    no_args_is_help=True,
    completion=True,
)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"farspan {VERSION}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options before the command."""


# Errors of a write whose reader is gone: a pipe, a terminal, a connection.
GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk of a log file, which may have space later


class Lasting(io.FileIO):
    """Standard output or error that outlives its reader: after `| head`, a closed terminal or a
    full disk, the run goes on, and output that cannot be written is dropped."""

    lost: ClassVar[set[int]] = set()  # descriptors whose disk was full

    def write(self, data: Any) -> int:
        """Write as FileIO does, but drop the data if the reader is gone or the disk is full."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in FULL:
                self.lost.add(self.fileno())
                return len(data)
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


# Replacements of characters that an encoding lacks; others are decomposed.
PLAIN = {"█": "#", **dict.fromkeys("▉▊▋▌", "+"), **dict.fromkeys("▍▎▏", "-")}
PLAIN |= {"×": "x", "…": "...", "–": "-", "—": "-", "→": "->", "≤": "<=", "≥": ">=", "✓": "ok"}
PLAIN |= {
    "│": "|",
    **dict.fromkeys("─━╸╺", "-"),
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
}


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Error handler for `codecs`: replace characters that an encoding lacks by similar ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    parts = (PLAIN.get(c) or unicodedata.normalize("NFKD", c) for c in characters)
    plain = ("".join(filter(str.isascii, part)) or "?" for part in parts)
    return "".join(plain), error.end


codecs.register_error("in_ascii", in_ascii)


def lasting(stream: Any) -> Any:
    """Return standard output or error as a stream that drops what cannot be written, and replaces
    characters that its encoding lacks. A stream that a caller of `main` has set stays unchanged."""
    if stream is None or stream.closed:
        return open(os.devnull, "w", encoding="utf-8")
    try:
        if stream.fileno() not in (1, 2):
            return stream
    except io.UnsupportedOperation:
        return stream
    raw = Lasting(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="in_ascii",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class Notices(logging.Formatter):
    """Formatter of log messages, which folds warnings to the terminal's width."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(part for line in super().format(record).split("\n") for part in fold(line))


def main(called: Callable[[], Any] = app) -> None:
    """Run the command line. A user's error is printed as a clear message, never as a traceback."""
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
    if not sys.stderr.isatty():  # tqdm reads it at import; hides bars of loading and tokenizing
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Set before torch loads OpenMP: threads wait without spinning. Next to another process on two
    # cores a step took 3.5 to 4.4 s with this and 5 to 30 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Put tensors of 2 MiB and more in huge pages: if freed memory is returned (train.memory), a
    # step with four-bit weights took 26 s of CPU with this and 35 s without.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Notices())
    try:
        called()
    except UnsupportedError as error:
        print(f"farspan: {error}", file=sys.stderr)
        sys.exit(USAGE)
    except WriteFailed as error:
        print(f"farspan: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except OSError as error:
        if error.filename is None:
            raise
        words = f"farspan: {error.filename}: {error.strerror}; fix its permissions, or name another"
        print(words, file=sys.stderr)
        sys.exit(USAGE)
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and "map segment" not in str(error):
            raise
        words = f"main memory: this process can get no more ({error or 'none is left'}); raise "
        print(f"farspan: {words}its limit (`ulimit -v`), or use less memory", file=sys.stderr)
        sys.exit(FAILED)
    except SystemExit as done:
        sys.stdout.flush()
        if not done.code and 1 in Lasting.lost:
            print("farspan: output was lost: the disk it goes to is full", file=sys.stderr)
            raise SystemExit(FAILED) from done
        raise
