"""`farspan memory`: the commands of farspan-memory, and traces of a model's steps."""

from farspan.allocator import allocator_package
from farspan.cli import LazyCommand, lazy_group

COMMANDS = {
    "trace": LazyCommand(
        "farspan.cli.with_torch",
        "Write the allocations and releases of a training step; needs no GPU.",
        app="trace_app",
    ),
    "place": LazyCommand(
        "farspan_memory.cli",
        "Plan an address for each tensor of a trace, as low as possible.",
        app="place_app",
    ),
    "compare": LazyCommand(
        "farspan_memory.cli",
        "Compare four allocators on one trace: the memory that they need, and their driver calls.",
        app="compare_app",
    ),
}

app = lazy_group(
    COMMANDS,
    within=allocator_package,
    name="memory",
    help="Trace a step's memory, plan addresses for it, compare allocators on it.",
    no_args_is_help=True,
)
