"""Faults in the choice of kernels: attention's in each direction, products in FP8."""

from tests.mutants.faults import Fault

CHOSEN = "tests/engine/test_kernels.py::"
EACH_WAY = "test_each_direction_has_the_kernel_that_was_measured_for_it"
FP8 = "tests/engine/test_float8.py::"
GRAPHS = "tests/engine/test_graphs.py::"
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
    Fault(
        "fp8: layers compute their products in the model's dtype",
        "out: Tensor = shell_of(self.like, parameters=parameters)(x)",
        "out: Tensor = nn.functional.linear(x, **parameters)",
        (f"{FP8}test_a_step_is_that_of_the_converted_model[60]",),
    ),
    Fault(
        "fp8: frozen weights are taken",
        'return "is frozen" if trains and not weight.requires_grad else None',
        "return None",
        (f"{FP8}test_a_model_that_cannot_is_refused",),
    ),
    Fault(
        "fp8: plans price products as ever",
        "if fp8 and self.fp8 is not None:",
        "if fp8 and self.fp8 is None:",
        (f"{FP8}test_plans_price_it_and_say_so",),
    ),
    Fault(
        "fp8: a run's files do not call it approximate",
        'return found if products is None else {**found, "products": products.value}',
        "return found",
        (f"{FP8}test_every_output_of_a_run_says_so",),
    ),
    Fault(
        "graphs: a replay reads the inputs of the call before the last",
        "place.copy_(getattr(interpreter.inputs, name))",
        "place.clone()",
        (f"{GRAPHS}test_a_step_is_replayed_to_the_same_bits[schedule0-dtype0]",),
    ),
    Fault(
        "graphs: weights may move",
        "[_place(x) for x in fixed],",
        "len(fixed),",
        (f"{GRAPHS}test_what_happens_between_steps_is_taken_up[moved]",),
    ),
    Fault(
        "graphs: gradients that are held are overwritten",
        "_uses(place) == alone if p.grad is None else",
        "True if p.grad is None else",
        (f"{GRAPHS}test_gradients_that_are_held_stay",),
    ),
    Fault(
        "graphs: weights may be read in another order",
        "return x.data_ptr(), x.stride(), x.dtype",
        "return x.data_ptr(), x.dtype",
        (f"{GRAPHS}test_what_happens_between_steps_is_taken_up[turned]",),
    ),
    Fault(
        "graphs: gradients begin as the latest replay left them",
        "torch._foreach_zero_(begun)",
        "torch._foreach_abs(begun)",
        (f"{GRAPHS}test_a_step_is_replayed_to_the_same_bits[schedule0-dtype0]",),
    ),
    Fault(
        "graphs: narrow gradients leave their places",
        "own.gradients.in_place = True",
        "own.gradients.in_place = False",
        (f"{GRAPHS}test_gradients_of_micro_batches_add_up[dtype1]",),
    ),
)
