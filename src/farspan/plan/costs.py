"""Work of an instruction in floating-point operations."""

from farspan.plan.program import AttentionMode, Backward, Forward, Head, Instruction, Program

BACKWARD_ATTENTION = 2.5  # five matrix products against two
BACKWARD_LINEAR = 2.0  # gradients of the input and of the weights


def work_of(program: Program, instruction: Instruction) -> float:
    """FLOP of a cell or a head, counting causal attention only over the keys a query sees."""
    model, batch = program.model, program.run.batch
    match instruction:
        case Forward(layer, chunk, mode):
            linear = _linear(program, chunk)
            if mode is AttentionMode.NONE:
                spec = model.layers[layer]
                tokens = program.chunks[chunk][1] - program.chunks[chunk][0]
                return 2.0 * batch * tokens * model.hidden * spec.kv_elements()
            compute = mode is AttentionMode.COMPUTE
            return linear + (_attention(program, layer, chunk) if compute else 0.0)
        case Backward(layer, chunk):
            return BACKWARD_LINEAR * _linear(program, chunk) + (
                BACKWARD_ATTENTION * _attention(program, layer, chunk)
            )
        case Head(chunk, gradient):
            start, stop = program.chunks[chunk]
            return (
                2.0 * batch * (stop - start) * model.hidden * model.vocab * (3 if gradient else 1)
            )
        case _:
            return 0.0


def _linear(program: Program, chunk: int) -> float:
    model = program.model
    inner = max(0, model.parameters - 2 * model.hidden * model.vocab) / len(model.layers)
    start, stop = program.chunks[chunk]
    return 2.0 * inner * program.run.batch * (stop - start)


def _attention(program: Program, layer: int, chunk: int) -> float:
    spec = program.model.layers[layer]
    start, stop = program.chunks[chunk]
    keys = (start + stop) / 2
    if spec.window is not None:
        keys = min(keys, spec.window)
    width = spec.query_heads * (spec.head_dim + spec.value_dim)
    return 2.0 * width * program.run.batch * (stop - start) * keys
