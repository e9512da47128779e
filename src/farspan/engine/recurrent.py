"""Run cells of recurrent layers, whose state goes from chunk to chunk, and of feed-forward layers.

A chunk's state is stored where attention layers have K, V of its tokens (program.layout). A cell
reads the state that the previous chunk left and, except in the last chunk, leaves its own state;
its backward reads the gradient of the state it left, and adds to that of the state it read.
Documents that end within a chunk cut it into pieces: only the first piece of a row continues from
the previous chunk, and only the last passes a state on. A layer that also attends runs once on its
chunk, for attention knows documents; the modules in it that leave a state run in pieces.

Shapes. A state is [B, ...] in its own dtype; in a buffer it is stored in the rows [T, B, row] of
its chunk, from their first element on, in the model's or the accumulate dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from farspan.engine.attention_op import AttentionContext, ChunkAttention, KVWritten
from farspan.engine.buffers import KVPrefix, ProgramBuffers, Span, StagingBuffers
from farspan.engine.gradients import GraphInput, RunChunk, enter
from farspan.hf.attention_interface import answering
from farspan.hf.dropout import Draws, TokenRange
from farspan.hf.recurrent import (
    RecurrentStates,
    mixers,
    run_mixer,
    run_piece,
    state_dtype,
    takes_two,
    with_states,
)
from farspan.hf.stages import CausalLMStages, LayerCall, run_layer
from farspan.hf.swap import forwards, put_in
from farspan.program.dependencies import Hazard, Lane
from farspan.program.program import AttentionMode, Backward, Forward, Program
from farspan.spec import LayerSpec, StateTensor, Tier

Rows = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _DocumentPiece:
    """Tokens [start, stop) of one document, in batch rows whose documents have the same bounds."""

    rows: slice
    start: int
    stop: int
    goes_on: bool  # continues from the previous chunk
    hands_on: bool  # passes its state to the next chunk


@dataclass(slots=True)
class RecurrentCell:
    """Cell (layer, chunk) of a recurrent layer, from its forward to its backward."""

    spec: LayerSpec
    layer: nn.Module
    pieces: list[_DocumentPiece]
    call: Callable[[_DocumentPiece, int], LayerCall]  # for a number of tokens
    q_start: int
    before: Rows  # state from the previous chunk
    only_state: bool = False  # the output is not needed
    graph_inputs: list[GraphInput] = field(default_factory=list)  # of the tensors in `before`
    after: Rows = field(default_factory=dict)
    edges: list[GradientEdge] = field(default_factory=list)  # of the tensors in `after`
    draws: Draws | None = None
    attention: ChunkAttention | None = None  # of a layer that also attends

    def is_cut(self) -> bool:
        """Return whether a document ends inside the chunk: saved bytes may then exceed the plan."""
        return len(self.pieces) > 1

    def run(self, hidden: Tensor) -> Tensor:
        """Run the layer on its chunk, [B, C, hidden] in and out."""
        if torch.is_grad_enabled():
            self._enter()
        if self.attention is not None:
            return self._run_attending(hidden, self.attention)
        if self.only_state:
            self._hand_on(hidden)
            return hidden
        return self._run_pieces(partial(self._run, hidden))

    def _run_attending(self, hidden: Tensor, attention: ChunkAttention) -> Tensor:
        """Run a layer that also attends; stop before its output if only K, V, state are needed."""
        self._stand_at_chunk(hidden)
        call = self.call(self._whole(hidden), hidden.shape[1])
        call = with_states(call, RecurrentStates(attends=True))
        others = {mixer: partial(self._mix, hidden, mixer) for mixer in mixers(self.layer)}
        own = answering(attention, attention.choose)
        with own, put_in(forwards(others)), suppress(KVWritten):
            return run_layer(self.layer, hidden, call)
        return hidden

    def _mix(self, hidden: Tensor, mixer: nn.Module, *arguments: Any, **keywords: Any) -> Tensor:
        """Run a module that has a state on each piece of the chunk, in order."""

        def run(piece: _DocumentPiece, states: RecurrentStates) -> Tensor:
            self._stand_at(piece, states)
            tokens = slice(piece.start - self.q_start, piece.stop - self.q_start)
            return run_mixer(mixer, (arguments, keywords), piece.rows, tokens, states)

        out = self._run_pieces(run)
        self._stand_at_chunk(hidden)
        return out

    def _whole(self, hidden: Tensor) -> _DocumentPiece:
        """Return the whole chunk as one piece, whose positions begin anew with each document."""
        stop = self.q_start + hidden.shape[1]
        return _DocumentPiece(slice(0, None), self.q_start, stop, False, True)

    def _stand_at_chunk(self, hidden: Tensor) -> None:
        self._stand_at(self._whole(hidden), RecurrentStates())

    def _stand_at(self, piece: _DocumentPiece, states: RecurrentStates) -> None:
        """Set the tokens for which dropout draws next: those of a piece."""
        if self.draws is not None:
            tokens = piece.stop - piece.start
            extra = takes_two(tokens, states.before)
            self.draws.at(TokenRange(piece.start, tokens + extra, piece.rows.start, extra))

    def _run_pieces(self, run: Callable[[_DocumentPiece, RecurrentStates], Tensor]) -> Tensor:
        outs: list[list[Tensor]] = []
        handed: list[Rows] = []
        for _, pieces in groupby(self.pieces, key=lambda piece: piece.rows.start):
            outs.append([])
            for piece in pieces:
                states = self._states(piece)
                outs[-1].append(run(piece, states))
                if piece.hands_on:
                    handed.append(states.after)
        self.after = {s.name: _joined([x[s.name] for x in handed], 0) for s in self.spec.state}
        return _joined([_joined(row, 1) for row in outs], 0)

    def _enter(self) -> None:
        for name, state in self.before.items():
            self.before[name], graph_input = enter(state)
            self.graph_inputs.append(graph_input)

    def _hand_on(self, hidden: Tensor) -> None:
        wanted, handed = frozenset(s.name for s in self.spec.state), []
        for piece in self.pieces if wanted else ():
            if piece.hands_on:
                states = self._states(piece)
                states.until_known(wanted, partial(self._run, hidden, piece, states))
                handed.append(states.after)
        self.after = {s.name: _joined([x[s.name] for x in handed], 0) for s in self.spec.state}

    def seal(self) -> None:
        """Drop states after the forward; their graph edges stay for the backward."""
        if any(state.requires_grad for state in self.after.values()):
            self.edges = [get_gradient_edge(self.after[s.name]) for s in self.spec.state]
        self.before, self.after = {}, {}
        if self.attention is not None:
            self.attention.write_kv = self.attention.held = None
            self.attention.goes_on = lambda: False  # the other held the cell, and so itself

    def forget(self) -> None:
        """Drop the graph's inputs and edges, if the backward will build the graph again."""
        self.graph_inputs, self.edges = [], []

    def _states(self, piece: _DocumentPiece) -> RecurrentStates:
        if not piece.goes_on:
            return RecurrentStates()
        return RecurrentStates({name: x[piece.rows] for name, x in self.before.items()})

    def _run(self, hidden: Tensor, piece: _DocumentPiece, states: RecurrentStates) -> Tensor:
        tokens = piece.stop - piece.start
        self._stand_at(piece, states)
        x = hidden[piece.rows, piece.start - self.q_start : piece.stop - self.q_start]
        call = self.call(piece, tokens + takes_two(tokens, states.before))
        if not self.spec.state:
            return run_layer(self.layer, x, call)
        return run_piece(self.layer, x, call, states)


@dataclass(slots=True)
class Recurrent:
    """Context that all recurrent cells in one run of a program share."""

    stages: CausalLMStages
    program: Program
    storage: ProgramBuffers
    slots: StagingBuffers
    attention: AttentionContext
    chunk: int = -1
    calls: dict[tuple[int | None, ...], list[LayerCall]] = field(default_factory=dict)

    def cell(self, i: Forward, held: tuple[Tensor, Tensor] | None) -> RecurrentCell:
        """Return the cell of a forward, with the state that the previous chunk left in a buffer.
        For `held` see `AttentionContext.begin`."""
        spec = self.program.model.layers[i.layer]
        cell = RecurrentCell(
            spec,
            self.stages.running[i.layer],
            list(self._pieces(i.layer, i.chunk)),
            partial(self._call, i),
            self.program.chunks[i.chunk][0],
            self._before(i.layer, i.chunk, i.prefix),
            i.mode is AttentionMode.NONE,
            draws=self.attention.inputs.place,
        )
        if spec.attends():
            cell.attention = self.attention.begin(i, held)
            cell.attention.goes_on = partial(self._goes_on, i, cell, cell.attention)
        return cell

    def _goes_on(self, i: Forward, cell: RecurrentCell, attention: ChunkAttention) -> bool:
        """Return whether a cell that runs for K, V and the state alone needs attention's output to
        reach the state; if so, start fetching the keys."""
        if cell.after:
            return False
        self.attention.fetch(attention, i.layer, i.chunk)
        return True

    def again(self, i: Backward, cell: RecurrentCell) -> RunChunk:
        """Return a function that runs a cell's forward again, for its backward."""
        cell.before = self._before(i.layer, i.chunk, i.prefix)
        if cell.attention is not None:
            self.attention.again(i, cell.attention)
        return cell.run

    def leave(self, i: Forward, cell: RecurrentCell) -> None:
        """Write the state that the cell leaves for the next chunk to the buffer."""
        if i.write_kv is not None and not self._is_last(i.chunk):
            rows = self.storage.chunk(i.write_kv, i.chunk, i.layer)
            for state in cell.spec.state:
                _held(rows[state.name], state).copy_(cell.after[state.name].detach())

    def begin_backward(self, i: Backward) -> KVPrefix:
        """Start fetching the state that the cell read in its forward, and that state's gradient
        sums."""
        copies = self.storage.copies
        if self.program.model.layers[i.layer].attends():
            # The cell's attention has just added to sums in the same rows.
            copies.wait(Lane.FETCH, copies.record(Lane.EVICT), Hazard.STILL_LEAVING)
        return self._prefix(i.layer, i.chunk, i.prefix, i.accumulator)

    def given(self, i: Backward, cell: RecurrentCell) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the graph edges of the state that the cell left, and its gradients."""
        if self._is_last(i.chunk) or not cell.spec.state:
            return [], []
        rows = self.storage.chunk(i.own_dkv, i.chunk, i.layer)
        dtype = self.storage.dtype
        gradients = [_held(rows[s.name], s).to(state_dtype(s, dtype)) for s in cell.spec.state]
        return cell.edges, gradients

    def add(self, prefix: KVPrefix, i: Backward, cell: RecurrentCell) -> None:
        """Add the gradients of the state that the cell read to the previous chunk's sums."""
        if not cell.spec.state or not i.chunk:
            return
        start, stop = self.program.share.keys.rows[i.chunk - 1]
        batch, whole = self.program.run.batch, {}
        wide, device = self.storage.accumulate_dtype, self.stages.device
        for state, graph_input in zip(cell.spec.state, cell.graph_inputs, strict=True):
            shape = stop - start, batch, state.row
            whole[state.name] = rows = torch.zeros(shape, dtype=wide, device=device)
            for gradient in graph_input.sink:  # empty if documents begin with the chunk
                _held(rows, state).copy_(gradient)
        for low, high in self._spans(i.chunk, i.prefix):
            prefix.tensors(low, high)
            prefix.add(low, high, {n: x[low - start : high - start] for n, x in whole.items()})
        prefix.done()

    # -- inputs of a cell --------------------------------------------------------------------------

    def _before(self, layer: int, chunk: int, name: str) -> Rows:
        """Return copies of the state that the previous chunk left."""
        spec, batch = self.program.model.layers[layer], self.program.run.batch
        if not spec.state or not chunk:
            return {}
        prefix, parts = self._prefix(layer, chunk, name), []
        for span in self._spans(chunk, name):
            parts.append({name: x.flatten().clone() for name, x in prefix.tensors(*span).items()})
        prefix.done()
        states = {}
        for state in spec.state:
            flat = _joined([part[state.name] for part in parts], 0)[: batch * prod(state.shape)]
            dtype = state_dtype(state, self.storage.dtype)
            states[state.name] = flat.view(batch, *state.shape).to(dtype)
        return states

    def _pieces(self, layer: int, chunk: int) -> Iterator[_DocumentPiece]:
        """Yield the chunk's pieces, each of one document; neighbouring batch rows with the same
        bounds share pieces. Layers without a state run over all documents at once."""
        start, stop = self.program.chunks[chunk]
        rows, first = self.attention.runs(chunk), 0
        if rows is None or not self.program.model.layers[layer].state:
            yield _DocumentPiece(slice(0, None), start, stop, goes_on=chunk > 0, hands_on=True)
            return
        for runs, alike in groupby(rows):
            last = first + len(list(alike))
            for run in runs:
                goes_on, hands_on = run.document_start < start, run.stop == stop
                yield _DocumentPiece(slice(first, last), run.start, run.stop, goes_on, hands_on)
            first = last

    def _call(self, i: Forward, piece: _DocumentPiece, tokens: int) -> LayerCall:
        """Return the arguments of a layer's call on a piece, padded to `tokens` tokens."""
        if self.chunk != i.chunk:
            self.chunk, self.calls = i.chunk, {}
        key = piece.rows.start, piece.rows.stop, piece.start, tokens
        if key not in self.calls:
            rows = self.attention.inputs.position_ids
            rows = rows[piece.rows] if len(rows) > 1 else rows
            positions = rows[:, piece.start : piece.stop]
            more = positions[:, :1].expand(-1, tokens - positions.shape[1])
            batch = len(range(*piece.rows.indices(self.program.run.batch)))
            with torch.no_grad():
                both = torch.cat([positions, more], dim=1)
                self.calls[key] = self.stages.calls(batch, both)
        return self.calls[key][i.layer]

    def _prefix(self, layer: int, chunk: int, name: str, sums: str | None = None) -> KVPrefix:
        prefix = KVPrefix(self.storage, self.slots, layer, name, sums)
        if chunk and self.program.model.layers[layer].state:
            prefix.begin(self._spans(chunk, name))
        return prefix

    def _spans(self, chunk: int, name: str) -> list[Span]:
        """Return the previous chunk's token range; if its buffer is on the host, cut into the
        ranges that are fetched one by one."""
        start, stop = self.program.share.keys.rows[chunk - 1]
        if self.program.buffers[name].tier is Tier.DEVICE:
            return [(start, stop)]
        size = self.program.schedule.kv_block
        cuts = [start, *range((start // size + 1) * size, stop, size), stop]
        return list(pairwise(cuts))

    def _is_last(self, chunk: int) -> bool:
        return chunk == len(self.program.chunks) - 1


def _held(rows: Tensor, state: StateTensor) -> Tensor:
    """View a layer's state, which comes first in `rows`, the rows of a chunk in a buffer."""
    batch = rows.shape[1]
    return rows.flatten()[: batch * prod(state.shape)].view(batch, *state.shape)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
