"""Token-wise modules on tiles, on phantoms: what `hf.tiled_mlp` allocates and which it takes.

Every statement here stands for one there, and temporaries live as long as theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from farspan.plan.cell.modules import Weights
from farspan.plan.cell.operations import Gradients, Saved, contiguous, narrow
from farspan.plan.cell.phantom import Found, Memory, Node, Phantom, copied, differentiate, record

Module = Callable[[Phantom], Phantom]

FEW = 64  # tokens: enough to tell what grows with them


def whole(module: Module, x: Phantom, needed: bool) -> Phantom:
    """A module on all tokens at once; `needed` says whether gradients of the layer depend on the
    value of its output."""
    del needed
    return module(x)


@dataclass(slots=True)
class Tiles:
    """How the token-wise modules of one cell run."""

    memory: Memory
    weights: Weights  # of the layer
    tokens: int  # of a tile
    value: bool  # the cell's output is read
    wide: int  # bytes of an element of a sum of weight gradients
    fresh: bool  # the sums are made in this cell's backward
    sums: dict[Node, Phantom] = field(default_factory=dict)  # of these weights' gradients

    def __call__(self, module: Module, x: Phantom, needed: bool) -> Phantom:
        """A module's output on x [B, C, hidden]."""
        if x.shape[1] <= self.tokens or not self._is_worth(module, x):
            return module(x)
        if not self.memory.grad:
            return self._whole(module, x)
        self.memory.grad = False
        out = self._whole(module, x) if self.value or needed else self._blank(x)
        self.memory.grad = True

        def backward(gradients: Gradients, saved: Saved) -> Found:
            (kept,), (dout,) = saved, gradients
            assert kept is not None
            assert dout is not None
            return [self._gradient(module, kept, dout)]

        return record(out, [x], backward, [x])

    def _is_worth(self, module: Module, x: Phantom) -> bool:
        """Autograd saves as much of it, besides input and weights, as its output has bytes."""
        memory = self.memory
        peak, traffic, grad = memory.peak, memory.traffic, memory.grad
        memory.grad = True
        few = memory.given((1, FEW, x.shape[2]), x.width, trained=True)
        out = module(few)
        assert out.node is not None
        held = [views[0].storage for views in out.node.holds().values()]
        saved = sum(storage.size for storage in held)  # what is given has no size
        memory.peak, memory.traffic, memory.grad = peak, traffic, grad
        return saved >= out.size

    def _blank(self, x: Phantom) -> Phantom:
        one = self.memory.new((), x.width)
        return Phantom(one.storage, x.shape, (0,) * len(x.shape), 0, x.width)

    def _whole(self, module: Module, x: Phantom) -> Phantom:
        out: Phantom | None = None
        for start, stop in self._spans(x):
            part = module(contiguous(narrow(x.bare(), 1, start, stop)))
            if out is None:
                out = self.memory.new((*x.shape[:2], *part.shape[2:]), part.width)
            self.memory.traffic += 2 * part.size
        assert out is not None
        return out

    def _gradient(self, module: Module, x: Phantom, dout: Phantom) -> Phantom:
        dx = self.memory.new(x.shape, x.width, x.strides if x.contiguous() else None)
        for start, stop in self._spans(x):
            tile = self._differentiate(module, x, dout, (start, stop))
            self.memory.traffic += 2 * tile.size
            del tile
        return dx

    def _differentiate(
        self, module: Module, x: Phantom, dout: Phantom, span: tuple[int, int]
    ) -> Phantom:
        tile = contiguous(narrow(x, 1, *span))
        tile.node = Node(0, None, (), (), tile.width)
        self.memory.grad = True
        out = module(tile)
        self.memory.grad = False
        towards = contiguous(narrow(dout.bare(), 1, *span))
        assert out.node is not None
        found = differentiate(out.node, towards)
        gradient = found.pop(tile.node)
        self._add(found)
        return gradient

    def _add(self, found: dict[Node, Phantom]) -> None:
        for weight, total in found.items():
            if self.fresh and weight not in self.sums:
                self.sums[weight] = copied(total, self.wide)
            else:
                self.memory.traffic += total.size + 2 * self.wide * (total.size // total.width)

    def _spans(self, x: Phantom) -> list[tuple[int, int]]:
        tokens = x.shape[1]
        return [(s, min(s + self.tokens, tokens)) for s in range(0, tokens, self.tokens)]
