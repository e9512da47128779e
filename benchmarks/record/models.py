"""Models of the papers, and what is asked of the planner about them."""

from dataclasses import replace
from functools import lru_cache

from farspan.planner.collectives import Collectives
from farspan.planner.evaluate import kinds_of
from farspan.planner.machines import machine
from farspan.planner.prices import Prices
from farspan.planner.request import Optimizer, Question
from farspan.program.builder import build_program
from farspan.program.layout import Layout
from farspan.program.program import AttentionMode, Backward, Forward, Head, Program
from farspan.spec import (
    Curve,
    LayerSpec,
    LayerWork,
    MachineSpec,
    ModelSpec,
    Rates,
    RunSpec,
    Schedule,
)

BF16 = 2
ALONE = Layout(fsdp=False)


def decoder(
    name: str,
    layers: int,
    shape: tuple[int, int, int],  # query heads, K, V heads, head dimension
    width: int,
    vocab: int,
    *,
    gated: bool,
    activation_bytes: int,  # a token and layer besides x, K, V, O and LSE
    tied: bool = False,
) -> ModelSpec:
    """A dense decoder in bfloat16. Norms and biases, under 0.02% of the weights, are left out."""
    heads, kv_heads, head_dim = shape
    hidden = heads * head_dim
    projections = [(hidden, hidden), (hidden, kv_heads * head_dim), (hidden, kv_heads * head_dim)]
    into = [(hidden, width)] * (2 if gated else 1)
    products = (*projections, (hidden, hidden), *into, (width, hidden))
    weights = sum(inner * outer for inner, outer in products)
    saved = activation_bytes + BF16 * (2 * hidden + 2 * kv_heads * head_dim)
    layer = LayerSpec(
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        activation_bytes=activation_bytes,
        # What is saved is written once and read once; the backward reads it and writes as much.
        work=LayerWork(weights, weights, products, 3, 2 * saved, 3 * saved),
    )
    total = layers * weights + (1 if tied else 2) * vocab * hidden
    return ModelSpec(name, hidden, vocab, (layer,) * layers, BF16, total, total)


def with_rates(
    machine: MachineSpec, forward: float, backward: float, matmul: float | None = None
) -> MachineSpec:
    """The machine with attention, and matrix products if given, at constant rates."""
    rates = machine.rates["bfloat16"]
    products = rates.matmul if matmul is None else Curve(((1.0, matmul),))
    own = Rates(products, Curve(((1.0, forward),)), Curve(((1.0, backward),)), rates.peak)
    return replace(machine, rates={"bfloat16": own})


def ask(model: ModelSpec, tokens: int, machine: MachineSpec, layout: Layout = ALONE) -> Question:
    """One sequence, copies beside the computation, no optimizer: the papers' iterations."""
    return Question(
        model, RunSpec(1, tokens), machine, layout, Optimizer.NONE, "bfloat16", overlap=True
    )


def program_of(question: Question, schedule: Schedule) -> Program:
    """The program of the rank that has the head."""
    rank = kinds_of(question, schedule)[-1].rank
    return build_program(question.model, question.run, schedule, rank)


def first_cells(program: Program, chunk: int) -> tuple[Forward, Backward]:
    """A computing forward cell and a backward cell of a chunk."""
    cells = [i for i in program.instructions if isinstance(i, Forward | Backward)]
    forward = next(i for i in cells if isinstance(i, Forward) and i.mode is AttentionMode.COMPUTE)
    backward = next(i for i in cells if isinstance(i, Backward))
    return replace(forward, chunk=chunk), replace(backward, chunk=chunk)


def layer_seconds(question: Question) -> tuple[float, float, float]:
    """One layer over the whole sequence: its forward, its forward given O, its backward. Products,
    attention, traffic and collectives are priced as for any program."""
    prices = whole_prices(question)
    forward, backward = first_cells(prices.program, 0)
    given = replace(forward, mode=AttentionMode.GIVEN)
    seconds = [prices.of(i).compute + prices.of(i).collective for i in (forward, given, backward)]
    return seconds[0], seconds[1], seconds[2]


def head_seconds(question: Question) -> float:
    """The head over the whole sequence, forward and backward."""
    return whole_prices(question).of(Head(0, gradient=True)).compute


def gather_seconds(question: Question) -> float:
    """What ZeRO-3 moves in a step of one sequence: weights before each pass, gradients after it."""
    model = question.model
    layer = model.layers[0].work.parameters
    collectives = Collectives(question)
    gathered = 2 * len(model.layers) - 1  # the last layer's backward follows at once
    return gathered * collectives.gather(layer) + collectives.reduce(
        model.trainable, model.accumulate_bytes()
    )


def whole_prices(question: Question) -> Prices:
    """Prices of a program of one layer and one chunk, the whole sequence."""
    short = one_layer(question.model, question.layout.pipeline)
    program = _whole_program(short, question.run.tokens, question.layout)
    return Prices(replace(question, model=short), program)


def one_layer(model: ModelSpec, stages: int = 1) -> ModelSpec:
    """The model with a layer a stage: enough to price each kind of cell."""
    return replace(model, layers=model.layers[:1] * stages)


@lru_cache(maxsize=512)
def _whole_program(model: ModelSpec, tokens: int, layout: Layout) -> Program:
    question = ask(model, tokens, machine("a800"), layout)  # a program knows no machine
    return program_of(question, Schedule(chunk=tokens, kv_block=tokens, alltoall_splits=1))
