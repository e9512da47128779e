"""What a checkpointed layer keeps: its input and what attention gave, so that attention is not
computed again; on the device, or on pinned host memory with copies beside the computation.

    forward    x0 O0 x1 O1 x2 O2 ...       each leaves on a stream of its own
    backward   ... x2 O2 | x1 O1 | x0 O0   the layer below comes while one is computed

torch.utils.checkpoint keeps nothing but inputs, and `save_on_cpu`, which transformers offers as
`offload=True`, copies them on the computing stream. This is what trainers do beyond that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = "aten::_scaled_dot_product"


@dataclass(slots=True)
class Held:
    """A tensor that a layer's backward takes once."""

    tensor: Tensor  # on host until it is fetched
    arrived: Any = None  # the event of its way back


@dataclass(slots=True)
class Layer:
    """What one layer keeps, in the order in which it was made."""

    number: int
    held: list[Held] = field(default_factory=list)
    attention: list[list[Any]] = field(default_factory=list)  # outputs of its calls


class Kept:
    """What the layers of one step keep. `clear` it after each.

    Invariant: a layer's tensors are on the device, or on their way, before its backward needs them.
    """

    def __init__(self, device: str, *, on_host: bool) -> None:
        self._device, self._on_host = device, on_host
        self._stream = torch.cuda.Stream() if on_host and device == "cuda" else None
        self._layers: list[Layer] = []

    def contexts(self) -> tuple["Keeping", "Giving"]:
        """For `context_fn` of torch.utils.checkpoint, which asks once a layer, before its
        forward: what surrounds that, and what surrounds it when it is computed again."""
        layer = Layer(len(self._layers))
        self._layers.append(layer)
        return Keeping(self, layer), Giving(self, layer)

    def inputs(self) -> saved_tensors_hooks:
        """Surrounds the model's forward: what checkpoints save in it are inputs of layers."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def clear(self) -> None:
        self._layers.clear()

    def _pack(self, x: Tensor) -> Any:
        """Parameters and small or whole numbers stay; the last norm's own are the last layer's."""
        is_hidden = x.dim() == 3 and x.is_floating_point() and bool(self._layers)
        if not (self._on_host and is_hidden):
            return x
        layer = self._layers[-1]
        return layer, self.hold(layer, x)

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.take(*packed)

    def hold(self, layer: Layer, x: Tensor) -> Held:
        """Keeps x for the layer. It leaves the device beside what is computed next."""
        x = x.detach()  # not what autograd is about to give a history
        if not self._on_host:
            return Held(x)
        host = torch.empty_like(x, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            host.copy_(x)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host.copy_(x, non_blocking=True)
            x.record_stream(self._stream)
        layer.held.append(Held(host))
        return layer.held[-1]

    def take(self, layer: Layer, held: Held) -> Tensor:
        """The tensor, on the device; this layer's others and the next one's begin to come."""
        for number in (layer.number, layer.number - 1):
            if self._on_host and number >= 0:
                for other in self._layers[number].held:
                    self._fetch(other)
                self._layers[number].held.clear()
        if held.arrived is not None:
            torch.cuda.current_stream().wait_event(held.arrived)
        return held.tensor

    def _fetch(self, held: Held) -> None:
        host = held.tensor
        held.tensor = torch.empty_like(host, device=self._device, pin_memory=False)
        if self._stream is None:
            held.tensor.copy_(host)
            return
        self._stream.wait_stream(torch.cuda.current_stream())  # whose memory it was
        with torch.cuda.stream(self._stream):
            held.tensor.copy_(host, non_blocking=True)
            held.arrived = self._stream.record_event()


class _Mode(TorchDispatchMode):
    def __init__(self, kept: Kept, layer: Layer) -> None:
        super().__init__()
        self.kept, self.layer = kept, layer


class Keeping(_Mode):
    """A layer's forward: what attention gives is kept."""

    def __torch_dispatch__(
        self,
        op: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        found = op(*args, **(kwargs or {}))
        if is_attention(op):
            out, *rest = found
            # The second is a number for each query, and the others are of dropout.
            rest = [x.detach() if isinstance(x, Tensor) else x for x in rest]
            self.layer.attention.append([self.kept.hold(self.layer, out), *rest])
        return found


class Giving(_Mode):
    """The same again: what attention gave is taken in its place."""

    def __torch_dispatch__(
        self,
        op: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if not is_attention(op):
            return op(*args, **(kwargs or {}))
        held, *rest = self.layer.attention.pop(0)
        return self.kept.take(self.layer, held), *rest


def is_attention(op: Any) -> bool:
    """Whether an operator is a forward of scaled_dot_product_attention."""
    name: str = op.name()
    return name.startswith(ATTENTION) and "backward" not in name
