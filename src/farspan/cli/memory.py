"""`farspan memory`: traces of allocations, static plans for them, and allocators compared. As with
the commands beside it, one's module is imported when it is called."""

from farspan.cli.group import lazy_group

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

app = lazy_group(
    COMMANDS,
    name="memory",
    help="Trace a step's memory, plan addresses for it, compare allocators on it.",
    no_args_is_help=True,
)
