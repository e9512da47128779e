"""Groups of commands whose modules are imported when a command is called, so that help and
planning need no torch."""

from typing import Any

import typer
from typer.core import TyperGroup

from farspan.cli.ending import typer_app
from farspan.lazy import load

Commands = dict[str, tuple[str, str]]  # name: its module, the first line of its help


def lazy_group(commands: Commands, **options: Any) -> typer.Typer:
    """An application that knows its commands by name and help only, until one is called."""

    class LazyGroup(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """The called command as its module declares it, with what is left of the arguments."""
            name, _, rest = super().resolve_command(ctx, args)
            return name, typer.main.get_command(load(commands[str(name)][0], "app")), rest

    app = typer_app(cls=LazyGroup, **options)
    for name, (_, words) in commands.items():
        app.command(name, help=words)(lambda: None)
    return app
