"""Weight gradients: accumulated over chunks in fp32, closed into `.grad` once.

Adding the gradients of 1,024 chunks in bf16 costs 4 to 15% relative error; in fp32 nothing that
bf16 could show (facts measured on 64 to 1,024 tiles).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from farspan.attention.merge import accumulate_dtype
from farspan.parallel.fsdp import gradient_dtype

# Adds to `.grad` of a unit's parameters what all ranks have of them, and takes theirs out.
Reduce = Callable[[int, dict[nn.Parameter, Tensor]], None]


@contextmanager
def uncast(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside it autograd gives gradients in their parameter's own dtype, whatever `grad_dtype` is.

    They are widened as they are added: a cast before would take 18 bytes an element in place of
    10, and hold a layer's gradients in fp32 beside the sums.
    """
    wide = [p for p in parameters if p.dtype != p.grad_dtype == accumulate_dtype(p.dtype)]
    for parameter in wide:
        parameter.grad_dtype = None
    try:
        yield
    finally:
        for parameter in wide:
            parameter.grad_dtype = accumulate_dtype(parameter.dtype)


class Gradients:
    """Adds to `.grad` like `loss.backward()` does.

    A parameter whose gradient dtype (`grad_dtype`, or its own) is fp32 or wider accumulates in
    `.grad` itself; any other gets an fp32 accumulator that lives until its group is closed. Where
    several ranks have a part of each gradient every one does, and `reduce` adds them up.
    """

    def __init__(self, reduce: Reduce | None = None) -> None:
        self._open: dict[nn.Parameter, Tensor] = {}
        self._reduce = reduce

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._add(parameter, gradient)

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        final = gradient_dtype(parameter)
        if final == accumulate_dtype(parameter.dtype) and self._reduce is None:
            if parameter.grad is None:
                # Not the tensor autograd gave: it may be shared or laid out otherwise.
                parameter.grad = torch.empty_like(parameter, dtype=final).copy_(gradient)
            else:
                parameter.grad.add_(gradient)
        elif parameter in self._open:
            self._open[parameter].add_(gradient)
        else:
            wide = accumulate_dtype(parameter.dtype)
            self._open[parameter] = torch.empty_like(parameter, dtype=wide).copy_(gradient)

    def close(self, parameters: Iterable[nn.Parameter]) -> None:
        """Round the accumulators of these parameters into `.grad`, once."""
        for parameter in parameters:
            total = self._open.pop(parameter, None)
            if total is None:
                continue
            if parameter.grad is not None:
                total.add_(parameter.grad)
            parameter.grad = total.to(gradient_dtype(parameter))

    def reduce(self, unit: int) -> None:
        """The same with the accumulators of all ranks."""
        assert self._reduce is not None
        self._reduce(unit, self._open)
