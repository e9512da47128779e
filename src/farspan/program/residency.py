"""Tensors that grow with the sequence: a table with one row for each kind.

A row defines the parts of the kind's buffers and their bytes, the schedule's field with its tier, a
layer's buffers and their lifetimes, and the slots through which chunks cross the link. The
instructions that name its buffers define its readers and writers (program/dependencies.py); the
table describes them in words. Builder, sizes, simulation, checker, engine and report read it, and
the search's bounds, which count copies in small programs (planner/pass_counts.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from farspan.program import buffer_names as names
from farspan.spec import LayerSpec, ModelSpec, Schedule, Tier


class Kind(StrEnum):
    """Kind of tensor that a buffer holds."""

    X = "x"
    KV = "kv"
    DKV = "dkv"
    ATTENTION = "attention"
    ACTIVATIONS = "activations"
    MEANS = "means"  # mean keys of each page (OOMB 4.2)
    CHOICE = "choice"  # the pages that queries chose
    SLABS = "slabs"  # the chosen pages, in transit
    WEIGHTS = "streamed weights"  # of a group of layers, from main memory
    WEIGHT_GRADIENTS = "streamed gradients"  # of a group whose backward runs


class CutInto(StrEnum):
    """Unit in which a chunk takes space in a buffer."""

    TOKENS = "tokens"  # a row for each of the rank's tokens
    KEYS = "keys"  # a row for each of its keys
    CELLS = "cells"  # raw bytes of a cell, in a size that the builder sets
    GROUPS = "groups"  # raw bytes of a group of layers, for any chunk


class Until(StrEnum):
    """Time at which a layer's buffers of one kind are freed."""

    FIRST = "first pass"  # of its group, unless the group stays open
    BACKWARD = "backward"  # of its group
    NEVER = "end"  # slots only


class RowTensor(NamedTuple):
    """A tensor with one row of `shape` per token, batch first. `wide`: in the accumulate dtype."""

    name: str
    shape: tuple[int, ...]
    wide: bool = False


RowTensors = Callable[[ModelSpec, LayerSpec, int], list[RowTensor]]  # of a batch of this size
Name = Callable[[int], str]  # of a layer's buffer
INDEX = "index"  # index keys, by which queries choose tokens


@dataclass(frozen=True, slots=True)
class Residency:
    """Description of a kind of tensor: its parts, tier, buffers, slots used in turn, lifetime."""

    words: str  # its name in reports
    rows: CutInto
    written: str  # the writer, in words
    read: str
    until: Until
    homes: tuple[Name, ...] = ()  # a layer's buffers
    tier: str = ""  # the schedule's field with their tier; empty: on the device
    slots: tuple[tuple[str, ...], ...] = ()  # rings of slots
    contents: tuple[str, ...] = ()  # the checker's names of the content
    tensors: RowTensors = lambda *_: []  # of a row; empty for cells

    @property
    def in_cells(self) -> bool:
        return self.rows in (CutInto.CELLS, CutInto.GROUPS)

    def tier_of(self, schedule: Schedule) -> Tier:
        found = getattr(schedule, self.tier) if self.tier else Tier.DEVICE
        assert isinstance(found, Tier)
        return found


def _x(model: ModelSpec, _: LayerSpec, batch: int) -> list[RowTensor]:
    return [RowTensor("x", (batch, model.passed()))]


def _kv(model: ModelSpec, layer: LayerSpec, batch: int) -> list[RowTensor]:
    """Return the tensors K, V of an attention layer, with its index keys if it has an indexer, and
    the states of a recurrent layer."""
    wide = ((s, s.element_bytes != model.element_bytes) for s in layer.state)
    states = [RowTensor(state.name, (batch, state.row), apart) for state, apart in wide]
    if states and not layer.attends():
        return states
    key, value = (batch, layer.kv_heads, layer.head_dim), (batch, layer.kv_heads, layer.value_dim)
    indexer, index = layer.indexer, list[RowTensor]()
    if indexer is not None and indexer.dim:
        index.append(RowTensor(INDEX, (batch, indexer.dim), indexer.wide))
    return [RowTensor("k", key), RowTensor("v", value), *index, *states]


def _dkv(model: ModelSpec, layer: LayerSpec, batch: int) -> list[RowTensor]:
    """Return the gradients of K, V and of states. Index keys have none."""
    of = (one for one in _kv(model, layer, batch) if one.name != INDEX)
    return [RowTensor(one.name, one.shape, True) for one in of]


def _attention(_: ModelSpec, layer: LayerSpec, batch: int) -> list[RowTensor]:
    out = (batch, layer.query_heads, layer.value_dim)
    return [RowTensor("out", out), RowTensor("lse", out[:2], True)]


RESIDENCY: dict[Kind, Residency] = {
    Kind.X: Residency(
        words="inputs of layer groups",
        rows=CutInto.TOKENS,
        written="the group below, or the stage before; in the backward its gradient",
        read="the group above, and its backward",
        until=Until.BACKWARD,
        tier="boundary_inputs",
        slots=(names.X_IN, names.X_OUT),
        contents=("x", "gradient"),
        tensors=_x,
    ),
    Kind.KV: Residency(
        words="K, V",
        rows=CutInto.KEYS,
        written="the first forward of each cell, or the last before the backward",
        read="forward and backward of all later chunks",
        until=Until.BACKWARD,
        homes=(names.kv, names.kv_again, names.kv_home),
        tier="kv",
        slots=(names.KV_OWN, names.KV_BLOCKS),
        contents=("kv",),
        tensors=_kv,
    ),
    Kind.DKV: Residency(
        words="dK, dV",
        rows=CutInto.KEYS,
        written="the backward of all later chunks, which adds to it",
        read="the backward of its own chunk",
        until=Until.BACKWARD,
        homes=(names.dkv,),
        tier="kv",
        slots=(names.DKV_OWN, names.DKV_BLOCKS),
        contents=("dkv",),
        tensors=_dkv,
    ),
    Kind.ATTENTION: Residency(
        words="attention outputs, O and LSE",
        rows=CutInto.KEYS,
        written="the forward that computes attention",
        read="forwards that are given it, and backward",
        until=Until.BACKWARD,
        homes=(names.attention, names.attention_open),
        tier="attention",
        contents=("attention",),
        tensors=_attention,
    ),
    Kind.ACTIVATIONS: Residency(
        words="other activations",
        rows=CutInto.CELLS,
        written="the forward whose graph is kept",
        read="its backward",
        until=Until.BACKWARD,
        homes=(names.activations,),
        tier="activations",
        slots=(names.ACTIVATIONS,),
        contents=("activations",),
    ),
    Kind.MEANS: Residency(
        words="keys that pages are compared by",
        rows=CutInto.CELLS,
        written="the forward that writes K, V",
        read="forwards of later chunks that choose",
        until=Until.FIRST,
        homes=(names.means,),
        contents=("means",),
    ),
    Kind.CHOICE: Residency(
        words="numbers of the chosen pages",
        rows=CutInto.CELLS,
        written="the forward that chooses",
        read="every later forward of the cell, and its backward",
        until=Until.BACKWARD,
        homes=(names.choice,),
        contents=("choice",),
    ),
    Kind.SLABS: Residency(
        words="chosen pages in transit",
        rows=CutInto.CELLS,
        written="the cell that gathers them from host",
        read="the same",
        until=Until.NEVER,
        slots=(names.PAGES,),
    ),
    Kind.WEIGHTS: Residency(
        words="weights: two groups, embedding, head",
        rows=CutInto.GROUPS,
        written="nothing: they come from main memory",
        read="every cell of the group, embedding and head",
        until=Until.NEVER,
        slots=(names.WEIGHTS, (names.WEIGHTS_OUTER,)),
    ),
    Kind.WEIGHT_GRADIENTS: Residency(
        words="gradients: two groups, embedding, head",
        rows=CutInto.GROUPS,
        written="the group's backward, embedding and head, which add to it",
        read="nothing: they leave for main memory when the group closes",
        until=Until.NEVER,
        slots=(names.WEIGHT_GRADIENTS, (names.WEIGHT_GRADIENTS_OUTER,)),
    ),
}


def layer_buffers(layer: int, *until: Until) -> Iterator[str]:
    """Yield the names of the layer's buffers whose lifetime ends at one of the times `until`."""
    for row in RESIDENCY.values():
        if row.until in until:
            yield from (name(layer) for name in row.homes)
