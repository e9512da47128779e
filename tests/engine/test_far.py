"""The engine runs any `FarAttention`: one that sees every key gives the bits of dense attention."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from farspan.attention.chunk import AttentionCall, attend, attend_backward
from farspan.engine.attention_op import AttentionContext
from farspan.engine.buffers import KVPrefix
from farspan.engine.step import Step
from farspan.program.attention_blocks import Block
from farspan.program.program import Backward, Forward
from farspan.spec import LayerSpec, Schedule, Tier
from tests.zoo import VOCAB, make_model

Keys3 = tuple[Tensor, Tensor, Tensor]


@dataclass
class EveryKey:
    """A cell; `told` are the calls of the engine."""

    told: list[str]
    keys: KVPrefix | None = None

    def begin(self, keys: KVPrefix) -> None:
        self.told.append("begin")
        self.keys = keys

    def note(self, k: Tensor) -> None:
        self.told.append(f"note {len(k)}")

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.told.append("attend")
        assert self.keys is not None
        return attend(call, q, k, v, self.keys, sinks)

    def begin_backward(self, i: Backward, keys: KVPrefix) -> None:
        self.told.append(f"begin backward {i.chunk}")
        self.keys = keys

    def attend_backward(
        self,
        call: AttentionCall,
        dout: Tensor,
        of_keys: Keys3,
        attended: tuple[Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        self.told.append("attend backward")
        assert self.keys is not None
        return attend_backward(call, dout, *of_keys, attended, self.keys, sinks, narrow=True)


@dataclass
class EveryKeyStep:
    """A step and its runs."""

    cells: dict[tuple[int, int], list[list[str]]] = field(default_factory=dict)
    select: object = None
    seen: None = None

    def run(self, context: AttentionContext, *, watches: bool) -> "EveryKeyStep":
        assert watches
        assert context.program.trains()
        return self

    def held_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        raise AssertionError(f"{device}, {dtype}: no forecast is asked for")

    def cell(self, i: Forward) -> EveryKey:
        told: list[str] = []
        self.cells.setdefault((i.layer, i.chunk), []).append(told)
        return EveryKey(told)

    def near(self, _: LayerSpec, blocks: tuple[Block, ...], __: int) -> tuple[Block, ...]:
        return blocks


def outcome(schedule: Schedule, far: EveryKeyStep | None) -> Iterator[Tensor]:
    model = make_model("qwen2")
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    step = Step(model, schedule)
    step.far = far
    yield step(ids, ids).detach()
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


@pytest.mark.parametrize("kv", list(Tier))
def test_an_attention_that_sees_every_key_is_dense(kv: Tier) -> None:
    schedule, far = Schedule(chunk=16, groups=2, kv=kv, kv_block=16), EveryKeyStep()
    pairs = zip(outcome(schedule, far), outcome(schedule, None), strict=True)
    assert all(torch.equal(found, dense) for found, dense in pairs)
    for (_, chunk), passes in far.cells.items():
        told = [call for told in passes for call in told if call.startswith(("begin", "attend"))]
        assert told[:2] == ["begin", "attend"]
        assert told[-2:] == [f"begin backward {chunk}", "attend backward"]
        notes = [call for told in passes for call in told if call.startswith("note")]
        assert set(notes) == {"note 8" if chunk == 2 else "note 16"}
