"""Copies between tiers move bytes, count them by direction, and say the right things to CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.engine.tiers import CopyEngine, StreamOrder
from farspan.program.dependencies import Lane, Order, Wait

CUDA = torch.device("cuda", 0)


class Selected(TorchDispatchMode):
    """Bytes of an element of what is gathered by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func.overloadpacket.__name__ == "index_select":
            self.bytes.append(args[0].element_size())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "width", "offset", "element"),
    [
        (torch.bfloat16, 128, 0, 8),
        (torch.bfloat16, 128, 2, 4),
        (torch.bfloat16, 6, 0, 4),
        (torch.bfloat16, 5, 0, 2),
        (torch.float32, 64, 0, 8),
        (torch.float32, 5, 0, 4),
        (torch.float64, 3, 0, 8),
    ],
)
def test_rows_cross_the_link_in_wide_elements(
    dtype: torch.dtype, width: int, offset: int, element: int
) -> None:
    """As wide as rows and where they begin allow; the numbers are those of narrow ones."""
    copies = CopyEngine(torch.device("cpu"))
    total = torch.randn(offset + 9 * width, dtype=torch.float64).to(dtype)[offset:].view(9, width)
    before, rows = total.clone(), torch.tensor([7, 0, 4])
    values = torch.randn(3, width, dtype=torch.float64).to(dtype)
    found = torch.empty_like(values)
    with Selected() as selected:
        copies.gather(found, total, rows)
    copies.add_rows(total, rows, values)
    assert torch.equal(found, before[rows])
    assert selected.bytes == [element]
    before[rows] += values
    assert torch.equal(total, before)
    assert (copies.fetched, copies.evicted) == (2 * values.nbytes, values.nbytes)


@dataclass
class FakeCuda:
    """Streams and events that write down what they are told, `said`, by their order of making;
    stream 0 is the one that computes."""

    said: list[str] = field(default_factory=list)
    streams: int = 0
    events: int = 0
    at: int = 0  # the current stream

    def make_stream(self, device: torch.device, priority: int = 0) -> "FakeStream":
        assert device == CUDA
        assert priority < 0  # than the computation: its kernels' programs would all come first
        self.streams += 1
        return FakeStream(self, self.streams)

    def make_event(self) -> "FakeEvent":
        self.events += 1
        return FakeEvent(self, self.events)

    @contextmanager
    def on(self, stream: "FakeStream") -> Iterator[None]:
        before, self.at = self.at, stream.number
        yield
        self.at = before

    def current(self, device: torch.device) -> "FakeStream":
        assert device == CUDA
        return FakeStream(self, self.at)


@dataclass
class FakeStream:
    cuda: FakeCuda
    number: int

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.said.append(f"{self.number} waits {event.number}")

    def synchronize(self) -> None:
        self.cuda.said.append("the CPU waits")


@dataclass
class FakeEvent:
    cuda: FakeCuda
    number: int

    def record(self, stream: FakeStream) -> None:
        self.cuda.said.append(f"{stream.number} records {self.number}")


class Watched:
    """Stands for a tensor that is copied to."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.nbytes = 8

    def is_pinned(self) -> bool:
        return True

    def copy_(self, source: object, *, non_blocking: bool) -> None:
        assert isinstance(source, Watched)
        assert non_blocking
        self.cuda.said.append(f"{self.cuda.at} copies")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.make_event)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    return fake


def step(cuda: FakeCuda, copies: CopyEngine) -> None:
    """Fetch, compute with it, evict the result; the next fetch is told to wait for both."""
    orders: tuple[Order, ...] = (
        {Lane.FETCH: ()},
        {Lane.COMPUTE: (Wait(Lane.FETCH, 0),)},
        {Lane.EVICT: (Wait(Lane.COMPUTE, 1),)},
        {Lane.FETCH: (Wait(Lane.COMPUTE, 1), Wait(Lane.EVICT, 2))},
    )
    followed = StreamOrder(copies, orders)
    move = [copies.fetch, None, copies.evict, copies.fetch]
    copies.begin()
    for index, copy in enumerate(move):
        followed.before(index)
        if copy is None:
            cuda.said.append("0 computes")
        else:
            copy(Watched(cuda), Watched(cuda))  # type: ignore[arg-type]
        followed.after(index)
    copies.end()
    assert not followed.events, "events are held that nobody waits for"


def test_what_cuda_is_told(cuda: FakeCuda) -> None:
    step(cuda, CopyEngine(CUDA, overlap=True))
    assert cuda.said == [
        "0 records 1",
        "1 waits 1",
        "2 waits 1",
        "1 copies",
        "1 records 2",
        "0 waits 2",
        "0 computes",
        "0 records 3",
        "2 waits 3",
        "2 copies",
        "2 records 4",
        "1 waits 3",
        "1 waits 4",
        "1 copies",
        "1 records 5",
        "0 waits 5",
        "2 records 6",
        "0 waits 6",
    ]


class Blocking(TorchDispatchMode):
    """Of each copy, whether the CPU goes on before it has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func.overloadpacket.__name__ == "copy_":
            self.goes_on.append(bool((*args, False)[2]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("locked", [True, False])
def test_the_cpu_waits_for_copies_of_memory_that_is_not_locked(
    monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """See Note: [Memory that is not locked]. It is the host's end that is asked."""
    copies = CopyEngine(CUDA)
    host, device = torch.arange(4.0), torch.zeros(4)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: locked and tensor is host)
    with Blocking() as seen:
        copies.fetch(device, host)
        copies.evict(host, device)
    assert seen.goes_on == [locked, locked]


def test_a_small_tensor_is_read_where_nothing_can_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    class Elsewhere(torch.Tensor):
        device = CUDA

    copies, tensor = CopyEngine(CUDA), torch.arange(3).as_subclass(Elsewhere)
    monkeypatch.setattr(torch, "empty", refuse)
    assert copies.read(tensor)().tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_rows_of_memory_that_is_not_locked_are_moved_by_the_cpu() -> None:
    copies = CopyEngine(torch.device("cuda"), overlap=True)
    total = torch.randn(9, 5)
    before, rows = total.clone(), torch.tensor([7, 0, 4], device="cuda")
    values = torch.randn(3, 5, device="cuda")
    found = torch.empty_like(values)
    copies.begin()
    copies.gather(found, total, rows)
    copies.add_rows(total, rows, values)
    copies.end()
    assert torch.equal(found.cpu(), before[rows.cpu()])
    before[rows.cpu()] += values.cpu()
    assert torch.equal(total, before)
    assert (copies.fetched, copies.evicted) == (2 * values.nbytes, values.nbytes)
