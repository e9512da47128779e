"""Which outputs of layers nothing reads: those of cells rebuilt for their backward alone."""

from farspan.plan.program import Backward, Embed, Forward, Head, Load, Program, Receive, Send, Store

Cell = tuple[int, int]  # layer, chunk


def unread_outputs(program: Program) -> frozenset[Cell]:
    """Cells with a graph of their own chunk's backward whose output no later instruction reads: its
    gradient comes from elsewhere.

    Registers are named by layer, and a new value takes an old one's place, so what is written when
    the next one comes was not read.
    """
    found: set[Cell] = set()
    written: dict[int, Cell] = {}  # whose output is in hidden[layer]

    def read(layer: int) -> None:
        if layer in written:
            found.discard(written[layer])

    for i in program.instructions:
        match i:
            case Embed():
                written.pop(0, None)
            case Load(layer) | Receive(layer, gradient=False):
                written.pop(layer, None)
            case Store(layer) | Send(layer, gradient=False):
                read(layer)
            case Head():
                read(len(program.model.layers))
            case Backward(layer):
                written.pop(layer + 1, None)
            case Forward():
                read(i.layer)
                written.pop(i.layer + 1, None)
                if i.graph and not i.kept:
                    written[i.layer + 1] = i.layer, i.chunk
                    found.add((i.layer, i.chunk))
            case _:
                pass
    return frozenset(found)
