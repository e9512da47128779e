"""Faults of the planner, and one of a step that moves more than was planned."""

from tests.mutants.faults import Fault

PLANNER = (
    Fault(
        "margin: main memory may be filled",
        "device.left < margin.device or host.left < margin.host // question.near()",
        "device.left < margin.device",
        ("tests/planner/test_margin.py::test_main_memory_is_left_too",),
    ),
    Fault(
        "reserve: all main memory is planned with",
        "host_bytes=size - reserve, host_reserve=reserve",
        "host_bytes=size, host_reserve=reserve",
        ("tests/planner/test_ask.py::test_memory_in_place_of_the_machines",),
    ),
    Fault(
        "remedies: adapters are said to keep the results",
        'Remedy(f"{LORA} {RANK}", False,',
        'Remedy(f"{LORA} {RANK}", True,',
        ("tests/planner/test_remedies.py::test_of_every_kind_the_first_is_told_and_what_it_keeps",),
    ),
    Fault(
        "longest: a step may take longer than it may",
        "if plan.fits and took <= most:",
        "if plan.fits:",
        (
            "tests/planner/test_plans.py::"
            "test_where_a_step_may_take_so_long_the_longest_context_takes_it",
        ),
    ),
    Fault(
        "bound: copies are counted for the first layer alone",
        "yield (place, home.layer), (type(i), home.kind), i.chunk",
        "yield (place, 0), (type(i), home.kind), i.chunk",
        (
            "tests/program/test_residency.py::test_the_search_counts_its_copies",
            "tests/planner/test_bound.py::test_bounds_hold",
        ),
    ),
    Fault(
        "profile: positions of queries in a mask are left out",
        "_positions, keys = memory.new((block.queries,), 8), memory.new((block.keys,), 8)",
        "keys = memory.new((block.keys,), 8)",
        ("tests/profile/test_attention_kernels.py::test_bytes_of_a_chunk",),
    ),
    Fault(
        "bound: O and LSE of a saved cell are left out",
        "outside = (self.saves.attention >= self.saves.graphs)",
        "outside = (self.saves.attention >= 0)",
        (
            "tests/planner/test_bound.py::test_bounds_hold",
            "tests/planner/test_bound.py::test_memory_is_never_overestimated",
        ),
    ),
    Fault(
        "bound: groups' first inputs are counted twice",
        "inner[k, firsts] = 0.0",
        "inner[k, firsts] = 1.0",
        ("tests/planner/test_bound.py::test_memory_is_never_overestimated",),
    ),
    Fault(
        "timeline: a write does not wait for reads",
        "                end = use.used if writes else use.written",
        "                end = use.written",
        (
            "tests/planner/test_timeline.py::test_no_race",
            "tests/planner/test_timeline.py::test_times_are_those_of_the_engines_waits",
        ),
    ),
    Fault(
        "stages: chunks are cut by work that is done",
        "wanted = done - (done - whole) // left",
        "wanted = done + whole // left",
        ("tests/program/test_balance.py",),
    ),
    Fault(
        "search: a plan above the limit is the lightest",
        "if plan is not None and plan.seconds.total <= limit:",
        "if plan is not None:",
        (
            "tests/planner/test_footprint.py",
            "tests/planner/test_best_first.py::test_nothing_as_fast_takes_less",
        ),
    ),
    Fault(
        "fold: groups that are not built take no time",
        "self.more += (self.count - 1) * (end - self.free[lane])",
        "self.more += 0 * (end - self.free[lane])",
        ("tests/planner/test_timeline.py::test_few_layers_take_the_time_of_all",),
    ),
    Fault(
        "fold: gradients of layers that are not built are not reduced",
        "return ((layer, counts[layer] // counts[layers[0]]) for layer in range(*layers))",
        "return ((layer, 1) for layer in range(*layers))",
        ("tests/planner/test_timeline.py::test_few_layers_take_the_time_of_all",),
    ),
    Fault(
        "weights on host: the last groups are fetched again",
        "fetched = self.streamed_once((*groups, *groups[:-2]))",
        "fetched = self.streamed_once((*groups, *groups))",
        ("tests/planner/test_bound.py::test_bounds_hold",),
    ),
    Fault(
        "weights on host: slots of weights count twice",
        "return sum(aligned(max(sizes)) for sizes in found if sizes)",
        "return sum(2 * aligned(max(sizes)) for sizes in found if sizes)",
        (
            "tests/planner/test_bound.py::test_bounds_hold",
            "tests/planner/test_bound.py::test_memory_is_never_overestimated",
        ),
    ),
    Fault(
        "weights on host: sums of gradients are counted beside their slots",
        "if accumulates or self.streams:",
        "if accumulates:",
        ("tests/planner/test_walk.py::test_weights_in_main_memory_are_predicted",),
    ),
    Fault(
        "quantised: scales of four bytes are not counted",
        "scales + 4 * -(-scales // SCALES) + TABLES",
        "scales + TABLES",
        ("tests/planner/test_quantized.py::test_resident_bytes_are_as_planned",),
    ),
    Fault(
        "quantised: no module is unpacked",
        "cells = {name: _raised(lines, more) for",
        "cells = {name: _raised(lines, 0) for",
        ("tests/planner/test_quantized.py::test_one_module_at_a_time_is_unpacked",),
    ),
    Fault(
        "bounds: what runs after a group's end hides no gather",
        "inner + entered + remade - between)",
        "inner + entered + remade)",
        ("tests/planner/test_bound.py::test_bounds_hold_where_weights_are_gathered",),
    ),
    Fault(
        "bounds: no cell hides the gather of the weights after it",
        "shown = np.maximum(0.0, gather[1:] - first[:-1])",
        "shown = gather[1:]",
        ("tests/planner/test_bound.py::test_bounds_hold_where_weights_are_gathered",),
    ),
    Fault(
        "bounds: layers are gathered again behind their rebuild",
        "if grid.schedule.kv_kept:",
        "if True:",
        ("tests/planner/test_bound.py::test_bounds_know_the_network",),
    ),
    Fault(
        "sparse: bounds of time leave out choosing pages",
        "return sum(self.prices.sparse.votes(spec, chunk) for chunk in choosing)",
        "return 0.0 * len(choosing)",
        ("tests/sparse/test_planner.py::test_few_chunks_and_layers_stand_for_all",),
    ),
    Fault(
        "sparse: outlines of programs have all chunks",
        "found.update(range(start, min(stop, start + ENDS)), range(max(start, stop - ENDS), stop))",
        "found.update(range(start, stop))",
        ("tests/sparse/test_planner.py::test_few_chunks_and_layers_stand_for_all",),
    ),
    Fault(
        "sparse: the last page of a slab is fetched with the next again",
        "for start in range(0, len(self), most_units):",
        "for start in range(0, len(self), max(1, most_units - 1)):",
        ("tests/sparse/test_traffic.py", "tests/sparse/test_slabs.py"),
    ),
    Fault(
        "evenly: all groups keep where some should",
        "if not self.keeps() or (self.is_last and len(self.layers) == 1):",
        "if self.is_last and len(self.layers) == 1:",
        ("tests/planner/test_timeline.py::test_copies_of_every_nth_layer_hide",),
    ),
    Fault(
        "evenly: the first groups keep instead of every n-th",
        "begun = [ceil(share * group - 1e-9) for group in range(groups + 1)]",
        "begun = [min(group, ceil(share * groups - 1e-9)) for group in range(groups + 1)]",
        ("tests/planner/test_timeline.py::test_copies_of_every_nth_layer_hide",),
    ),
    Fault(
        "evenly: few layers keep as all do",
        "kept = frozenset(group for group, first in firsts if keeps[few[first]])",
        "kept = frozenset(group for group, first in firsts)",
        ("tests/planner/test_timeline.py::test_few_layers_take_the_time_of_all",),
    ),
    Fault(
        "evenly: bounds count cells of groups that keep none",
        "_summed(np.diff(of) * grid.splits.keeps)[at]",
        "_summed(np.diff(of) + 0 * grid.splits.keeps)[at]",
        ("tests/planner/test_bound.py::test_bounds_hold",),
    ),
    Fault(
        "bounds: every load counts as the entry of a group",
        "case Load() if program.buffers[i.buffer].kind is Kind.X:",
        "case Load():",
        ("tests/program/test_residency.py::test_only_a_load_of_x_enters_a_group",),
    ),
)
