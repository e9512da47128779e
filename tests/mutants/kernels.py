"""Faults in the choice of kernels: attention's in each direction."""

from tests.mutants.faults import Fault

CHOSEN = "tests/engine/test_kernels.py::"
EACH_WAY = "test_each_direction_has_the_kernel_that_was_measured_for_it"
TAKEN = "tests/engine/test_calibrate.py::test_kernels_that_are_here_are_compared"

KERNELS = (
    Fault(
        "attention: the forward's kernel computes the backward, too",
        "return self.back.backward(queries, k, v, block, scale)",
        "return self.ahead.backward(queries, k, v, block, scale)",
        (f"{CHOSEN}{EACH_WAY}",),
    ),
    Fault(
        "attention: blocks are those of the forward's kernel alone",
        "for part in self.ahead.split(block) for piece in self.back.split(part))",
        "for piece in self.ahead.split(block))",
        ("tests/attention/test_backends.py::test_blocks_of_two_kernels_are_those_of_both",),
    ),
    Fault(
        "kernels: the backward's measurement is not read",
        "return rates.kernel, rates.backward_kernel",
        "return rates.kernel, None",
        (f"{CHOSEN}{EACH_WAY}",),
    ),
    Fault(
        "calibrate: FlashAttention-2 and -3 are taken together",
        "pairs = [pair for pair in product(seconds, repeat=2) if set(pair) != APART]",
        "pairs = list(product(seconds, repeat=2))",
        (TAKEN,),
    ),
)
