"""Plans of torch.distributed.checkpoint for tensors that are cut into boxes over ranks.

Its own plans know DTensors and whole tensors. A rank's part of a fused projection that is cut over
`tensor` is several boxes of the whole, of which FSDP has cut off some rows: a `ShardPlacement`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from farspan.distributed.fsdp import ShardPlacement, ShardRegion
from farspan.spec import Refused

# A rank's tensor, live, and where it lies in the whole.
Entries = Mapping[str, tuple[Tensor, ShardPlacement]]


class Saving(DefaultSavePlanner):
    """Each box is written once, by one of the ranks that have it; together they fill every tensor
    and do not overlap."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._entries = entries
        self._boxes = boxes_of(entries)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(index) for index in self._boxes])

    def _item(self, index: MetadataIndex) -> WriteItem:
        tensor, place = self._entries[index.fqn]
        properties = TensorProperties(dtype=tensor.dtype)
        data = TensorWriteData(_chunk(self._boxes[index]), properties, torch.Size(place.shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # Torch looks for overlaps, but not always at what is filled.
        written = {item.index: item.tensor_data for plan in all_plans for item in plan.items}
        volumes: dict[str, int] = {}
        for index, data in written.items():
            assert data is not None
            volumes.setdefault(index.fqn, data.size.numel())
            volumes[index.fqn] -= data.chunk.sizes.numel()
        for name, missing in volumes.items():
            if missing:
                raise ValueError(f"the ranks' parts of {name} do not make the whole of it")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor, _ = self._entries[write_item.index.fqn]
        return self._boxes[write_item.index].of(tensor.detach())


class Loading(LoadPlanner):
    """Reads, into live tensors, the parts of saved boxes that overlap theirs."""

    def __init__(self, entries: Entries, unread: tuple[str, ...]) -> None:
        """Saved names that start with one of `unread` need not be anybody's."""
        self._entries = entries
        self._unread = unread
        self._boxes = boxes_of(entries)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, (tensor, place) in self._entries.items():
            self._refuse(name, tensor, place)
        for index, box in self._boxes.items():
            saved = self._saved[index.fqn]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(index.fqn, saved, [_chunk(box)])
        return LoadPlan(items, planner_data=sorted(self._entries))

    def _refuse(self, name: str, tensor: Tensor, place: ShardPlacement) -> None:
        saved = self._saved.get(name)
        if 0 in place.shape:
            return  # nothing of it was saved
        if not isinstance(saved, TensorStorageMetadata):
            raise Refused(f"of another model: only the model has {name}")
        there = saved.properties.dtype, tuple(saved.size)
        if there != (tensor.dtype, place.shape):
            raise Refused(
                f"of another model: {name} is {form_words(*there)}, here "
                f"{form_words(tensor.dtype, place.shape)}"
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        wanted = {name for plan in global_plan for name in plan.planner_data}
        for name in sorted(self._saved.keys() - wanted):
            if not name.startswith(self._unread):
                raise Refused(f"of another model: only the checkpoint has {name}")
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, *_: Any) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        tensor = self._boxes[index].of(self._entries[index.fqn][0].detach())
        zeros = (0,) * tensor.ndim
        return ShardRegion(tuple(read_item.dest_offsets), zeros, tuple(read_item.lengths)).of(
            tensor
        )

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read into place."""


def fill(boxes: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Whether boxes lie within a tensor, apart from each other, and fill it."""
    for index, box in enumerate(boxes):
        ends = [start + length for start, length in zip(box.offsets, box.sizes, strict=True)]
        inside = all(a >= 0 and b <= n for a, b, n in zip(box.offsets, ends, size, strict=True))
        if not inside or any(_overlap(box, other) for other in boxes[:index]):
            return False
    return sum(box.sizes.numel() for box in boxes) == size.numel()


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in pairs)


def boxes_of(entries: Entries) -> dict[MetadataIndex, ShardRegion]:
    return {
        MetadataIndex(name, box.there): box
        for name, (_, place) in entries.items()
        for box in place.boxes
    }


def _chunk(box: ShardRegion) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.there), torch.Size(box.sizes))


def form_words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Such as `float32[8, 16]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
