"""Work of an instruction in floating-point operations: what a step's progress is measured in.

A program's sum is MFU's `useful_flop` and, beside it, what is computed twice, and half a forward of
attention: its backward makes five matrix products where MFU counts four.
"""

from farspan.plan.program import AttentionMode, Backward, Forward, Head, Instruction, Program
from farspan.plan.reach import chunk_pairs
from farspan.spec import BACKWARD_PRODUCTS, LayerSpec, ModelSpec


def work_of(program: Program, instruction: Instruction) -> float:
    """FLOP of a cell or a head, counting causal attention only over the keys a query sees."""
    match instruction:
        case Forward(layer, chunk, mode):
            spec = program.model.layers[layer]
            if mode is AttentionMode.NONE:
                return 2.0 * _rows(program, chunk) * _projections(program, spec)
            linear = 2.0 * _rows(program, chunk) * linear_products(program.model, spec)
            compute = mode is AttentionMode.COMPUTE
            return linear + (_attention(program, spec, chunk) if compute else 0.0)
        case Backward(layer, chunk):
            spec = program.model.layers[layer]
            work = spec.work
            trained = work.trainable / work.parameters if work.parameters else 1.0
            linear = 2.0 * _rows(program, chunk) * linear_products(program.model, spec)
            attention = _attention(program, spec, chunk)
            return (1.0 + trained) * linear + BACKWARD_PRODUCTS * attention
        case Head(chunk, gradient):
            model = program.model
            forward = 2.0 * _rows(program, chunk) * model.hidden * model.vocab
            return forward * (2.0 + bool(model.outer_trainable()) if gradient else 1.0)
        case _:
            return 0.0


def _rows(program: Program, chunk: int) -> int:
    start, stop = program.chunks[chunk]
    return program.run.batch * (stop - start)


def _projections(program: Program, spec: LayerSpec) -> int:
    """Multiplications of a token before attention: those that make q, k and v."""
    if spec.work.products:
        projected = spec.work.products[: spec.work.projections]
        return sum(inner * outer for inner, outer in projected)
    return program.model.hidden * (spec.query_heads * spec.head_dim + spec.kv_elements())


def linear_products(model: ModelSpec, spec: LayerSpec) -> int:
    """Multiplications of a token in a layer, attention aside.

    Where nobody counted the layer's weights, an equal share of all but one table: a head of its own
    is then counted with the layers, 8% of a 7B model, which nothing here tells from a tied one.
    """
    if spec.work.products:
        return sum(inner * outer for inner, outer in spec.work.products)
    if spec.work.parameters:
        return spec.work.parameters
    return max(0, model.parameters - model.hidden * model.vocab) // len(model.layers)


def _attention(program: Program, spec: LayerSpec, chunk: int) -> float:
    pairs = chunk_pairs(program, spec, chunk)
    width = spec.query_heads * (spec.head_dim + spec.value_dim)
    return 2.0 * width * program.run.batch * pairs
