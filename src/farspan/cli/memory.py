"""`farspan memory`: traces of allocations, static plans for them, and allocators compared. As with
the commands beside it, one's module is imported when it is called."""

from typing import Any

import typer
from typer.core import TyperGroup

from farspan.cli.ending import typer_app
from farspan.lazy import load

# Module, and what `farspan memory --help` says of the command: the first line of its own help.
COMMANDS = {
    "trace": (
        "farspan.cli.memory_trace",
        "Write the allocations and releases of a training step; needs no GPU.",
    ),
    "place": (
        "farspan.cli.memory_place",
        "Plan an address for each tensor of a trace, as low as can be.",
    ),
    "compare": (
        "farspan.cli.memory_compare",
        "What four allocators make of the same trace: memory they need, and calls.",
    ),
}


class LazyGroup(TyperGroup):
    """Commands registered by name and help only, until one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The called command as its module declares it, with what is left of the arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, typer.main.get_command(load(COMMANDS[str(name)][0], "app")), rest


app = typer_app(
    cls=LazyGroup,
    name="memory",
    help="Trace a step's memory, plan addresses for it, compare allocators on it.",
    no_args_is_help=True,
)


def register(name: str, words: str) -> None:
    """Show the command in the help of the group."""
    app.command(name, help=words)(lambda: None)


for command, (_, first_line) in COMMANDS.items():
    register(command, first_line)
