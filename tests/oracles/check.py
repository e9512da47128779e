"""The dumb checker of programs: replays one and asks of every read whether it is there.

Views are the trap. A register that was loaded from a slot is a view of it, and so is what a graph
refers to: each remembers the write it saw (a pin), and that write must still stand when it is
used. The checker shares with `build` the types and the names of slots, and nothing else. Its time
grows with instructions x chunks.
"""

from dataclasses import dataclass, field

from farspan.program import buffer_names as names
from farspan.program.program import (
    Allocate,
    AttentionMode,
    Backward,
    Buffer,
    Clear,
    Close,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Free,
    Gather,
    Head,
    Instruction,
    Load,
    LoadGradient,
    Program,
    Receive,
    Reduce,
    Release,
    Send,
    Store,
    StoreGradient,
)
from farspan.program.residency import Kind
from farspan.spec import Cut, Tier
from tests.oracles.contents import Content, Contents, Pin, ProgramError

OUTER = -1  # the weights outside the layers, among groups


def check_program(program: Program, capacities: dict[Tier, int] | None = None) -> None:
    """Raise ProgramError unless the program computes one step, or one evaluation, exactly.

    Every read is resident and holds what the reader expects; the order extends the grid's; each
    cell, head and embedding runs backward once (never, in a program that only evaluates); buffers
    that live together are disjoint, within their arena and used. `capacities` are bytes a tier.
    """
    _check_grid(program)
    _check_capacities(program, capacities or {})
    replay = _Replay(program, Contents(program))
    for index, instruction in enumerate(program.instructions):
        replay.memory.index = index
        replay.step(instruction)
    replay.memory.index = -1
    replay.finish()


def _check_grid(program: Program) -> None:
    for ranges, size, what in (
        (program.chunks, program.run.tokens, "chunks"),
        (program.groups, len(program.model.layers), "groups"),
    ):
        borders = [0, *(stop for _, stop in ranges)]
        whole = [start for start, _ in ranges] == borders[:-1] and borders[-1] == size
        if not whole or any(start >= stop for start, stop in ranges):
            raise ProgramError(-1, f"{what} {ranges} do not cut {size}")


def _check_capacities(program: Program, capacities: dict[Tier, int]) -> None:
    for tier, capacity in capacities.items():
        wanted = program.arena_bytes[tier]
        if wanted > capacity:
            raise ProgramError(-1, f"{tier} needs {wanted} bytes and has {capacity}")


@dataclass(frozen=True, slots=True)
class _Register:
    chunk: int
    pins: tuple[Pin, ...] = ()  # what it is a view of


@dataclass(frozen=True, slots=True)
class _Graph:
    forward: Forward
    pins: tuple[Pin, ...]


@dataclass(slots=True)
class _Replay:
    """The registers, the graphs that wait for their backward, and what is done."""

    program: Program
    memory: Contents
    hidden: dict[int, _Register] = field(default_factory=dict)
    gradient: dict[int, _Register] = field(default_factory=dict)
    held: dict[int, _Register] = field(default_factory=dict)
    graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    heads: dict[int, bool] = field(default_factory=dict)  # chunk to: with gradient
    values: set[int] = field(default_factory=set)  # chunks whose head ran before the cut
    backwards: set[tuple[int, int]] = field(default_factory=set)
    embeddings: set[int] = field(default_factory=set)  # chunks whose EmbedBackward ran
    reduced: set[int] = field(default_factory=set)  # groups whose sums are those of all ranks
    closed: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)  # groups, and OUTER
    slots: dict[str, int] = field(default_factory=dict)  # of weights, of their gradients: of whom
    passed: set[Receive | Send] = field(default_factory=set)
    chosen: set[tuple[int, int]] = field(default_factory=set)  # cells whose pages are chosen

    def step(self, instruction: Instruction) -> None:
        memory = self.memory
        if memory.index == self.program.cut and self.program.cut_after is Cut.AFTER_HEAD:
            self._cut()
        match instruction:
            case Allocate(name):
                memory.allocate(name)
            case Free(name):
                memory.free(name)
            case Clear(name):
                memory.clear(name)
            case Fetch(source, target, chunk):
                memory.copy(source, target, chunk, Tier.HOST)
            case Evict(source, target, chunk):
                memory.copy(source, target, chunk, Tier.DEVICE)
            case Embed(chunk):
                memory.need(chunk in range(len(self.program.chunks)), f"there is no chunk {chunk}")
                self._need_weights(OUTER)
                self.hidden[0] = _Register(chunk)
            case Load(layer, chunk, buffer):
                pin = memory.read(buffer, "x", layer, chunk)
                self.hidden[layer] = _Register(chunk, (pin,))
            case Store(layer, chunk, buffer):
                self._take(self.hidden, "hidden", layer, chunk)
                memory.write(buffer, Content("x", layer, chunk))
            case LoadGradient(layer, chunk, buffer):
                pin = memory.read(buffer, "gradient", layer, chunk)
                self.gradient[layer] = _Register(chunk, (pin,))
            case StoreGradient(layer, chunk, buffer):
                self._take(self.gradient, "gradient", layer, chunk)
                memory.write(buffer, Content("gradient", layer, chunk))
            case Gather() | Release():
                self._weights(instruction)
            case Receive() | Send():
                self._pass_on(instruction)
            case Forward():
                self._forward(instruction)
            case Head(chunk, gradient):
                self._head(chunk, gradient)
            case Backward():
                self._backward(instruction)
            case EmbedBackward(chunk):
                self._take(self.gradient, "gradient", 0, chunk)
                memory.need(chunk not in self.embeddings, f"chunk {chunk} twice")
                self._need_weights(OUTER)
                self._need_sums(OUTER)
                self.embeddings.add(chunk)
            case Reduce(group):
                self._done(group)
                memory.need(group not in self.reduced, f"group {group} is reduced twice")
                self.reduced.add(group)
            case Close(group):
                self._close(group)

    def _take(self, bank: dict[int, _Register], name: str, layer: int, chunk: int) -> _Register:
        register = bank.pop(layer, None)
        found = None if register is None else register.chunk
        self.memory.need(found == chunk, f"{name}[{layer}] is of chunk {found}, not {chunk}")
        assert register is not None
        self.memory.standing(register.pins, f"{name}[{layer}]")
        return register

    def _weights(self, i: Gather | Release) -> None:
        if isinstance(i, Gather) and self._streams():
            for unit in (i.group, *[OUTER] * i.outer):
                self._fill(unit, i.gradients)
            return
        is_gather, units = isinstance(i, Gather), {i.group, *[OUTER] * i.outer}
        there = units & self.gathered
        self.memory.need(there == (set() if is_gather else units), f"{i}: {there} are whole")
        self.gathered = self.gathered | units if is_gather else self.gathered - units

    def _streams(self) -> bool:
        """Whole weights, that is; shards are gathered from wherever they are."""
        layout, on_host = self.program.share.rank.layout, self.program.schedule.weights is Tier.HOST
        return on_host and not (layout.fsdp and layout.devices() > 1)

    def _slot(self, unit: int, gradients: bool) -> str:
        ring = names.WEIGHT_GRADIENTS if gradients else names.WEIGHTS
        outer = names.WEIGHT_GRADIENTS_OUTER if gradients else names.WEIGHTS_OUTER
        return outer if unit == OUTER else ring[unit % 2]

    def _fill(self, unit: int, gradients: bool) -> None:
        """Weights come to their slot, or sums begin there, where none wait to leave."""
        name, model = self._slot(unit, gradients), self.program.model
        works = [layer.work for layer in model.layers]
        inside = sum(work.trainable if gradients else work.parameters for work in works)
        elements = (model.trainable if gradients else model.parameters) - inside
        if unit != OUTER:
            start, stop = self.program.groups[unit]
            own = works[start:stop]
            elements = sum(work.trainable if gradients else work.parameters for work in own)
        size = elements * (model.accumulate_bytes() if gradients else model.element_bytes)
        self.memory.need(self.memory.alive(name).bytes >= size, f"{name} is too small for {unit}")
        self.memory.used.add(name)
        before = self.slots.get(name)
        free = not gradients or before is None or before in self.closed
        self.memory.need(free, f"{name} has the gradients of {before}")
        self.slots[name] = unit

    def _need_sums(self, unit: int) -> None:
        if self._streams():
            found = self.slots.get(self._slot(unit, True))
            self.memory.need(found == unit, f"no room for the gradients of {unit}")

    def _need_weights(self, unit: int) -> None:
        if self._streams():
            found = self.slots.get(self._slot(unit, False))
            self.memory.need(found == unit, f"the weights of {unit} are away")
            return
        layout = self.program.share.rank.layout
        whole = layout.devices() == 1 or not layout.fsdp or unit in self.gathered
        self.memory.need(whole, f"the weights of {unit} are cut")

    def _pass_on(self, i: Receive | Send) -> None:
        """A stage is given each chunk's input, and the gradient of its output, once, and gives the
        others once."""
        first, stop = self.program.groups[self.program.own_groups()[0]]
        outer = stop if i.gradient is isinstance(i, Receive) else first
        ends = 0, len(self.program.model.layers)
        need = self.memory.need
        need(i.layer == outer and outer not in ends, f"no stage is beyond layer {i.layer}")
        need(i not in self.passed, f"{i} twice")
        self.passed.add(i)
        bank, name = (self.gradient, "gradient") if i.gradient else (self.hidden, "hidden")
        if isinstance(i, Send):
            self._take(bank, name, i.layer, i.chunk)
        else:
            bank[i.layer] = _Register(i.chunk)

    def _cut(self) -> None:
        """Between the halves of a step others compute: shards are shards, and nothing stays in
        registers. Slots keep their weights, as all memory of the step."""
        self.memory.need(not self.gathered, f"{self.gathered} are whole")
        self.memory.need(not (self.hidden or self.gradient or self.held), "registers are in use")

    def _head(self, chunk: int, gradient: bool) -> None:
        layer = len(self.program.model.layers)
        self._need_weights(OUTER)
        self._take(self.hidden, "hidden", layer, chunk)
        if self.memory.index < self.program.cut:
            self.memory.need(not gradient and chunk not in self.values, f"chunk {chunk} twice")
            self.values.add(chunk)
            return
        self.memory.need(chunk not in self.heads, f"chunk {chunk} twice")
        self.heads[chunk] = gradient
        if gradient:
            self._need_sums(OUTER)
            self.gradient[layer] = _Register(chunk)

    def _read_prefix(self, name: str, layer: int, chunk: int) -> None:
        """K, V of all earlier chunks, through the streaming slots when they are on host."""
        buffer = self._of_layer(name, Kind.KV, layer)
        for earlier in range(chunk):
            self.memory.read(name, "kv", layer, earlier)
        if chunk and buffer.tier is Tier.HOST:
            self.memory.stream(names.KV_BLOCKS, Kind.KV)

    def _of_layer(self, name: str, kind: Kind, layer: int) -> Buffer:
        buffer = self.memory.alive(name)
        fits = buffer.kind is kind and buffer.layer == layer
        self.memory.need(fits, f"{name} does not hold {kind} of layer {layer}")
        return buffer

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, i: Forward) -> None:
        self._check_flags(i)
        self._need_weights(self._group_of(i.layer))
        taken = self._take(self.hidden, "hidden", i.layer, i.chunk)
        if i.hold:
            self.hidden[i.layer] = taken
        self._of_layer(i.prefix, Kind.KV, i.layer)
        if self.program.model.layers[i.layer].state or i.mode is AttentionMode.COMPUTE:
            self._read_prefix(i.prefix, i.layer, i.chunk)
        self._choose(i)
        if i.write_kv is not None:
            self.memory.write(i.write_kv, Content("kv", i.layer, i.chunk))
        if i.mode is AttentionMode.NONE:
            return
        output = self._output(i)
        if i.graph:
            self.memory.need((i.layer, i.chunk) not in self.graphs, "the cell has a graph already")
            self.graphs[i.layer, i.chunk] = _Graph(i, (*taken.pins, *output))
        if i.kept:
            self._save_activations(i)
        if i.hold:
            self.held[i.layer] = _Register(i.chunk, output)
        if not i.drops:
            self.hidden[i.layer + 1] = _Register(i.chunk)

    def _choose(self, i: Forward) -> None:
        """A sparse cell chooses once, from the means of all earlier pages, and asks from then on.
        Means go with the K, V that they are of."""
        memory, wanted = self.memory, self._must_choose(i.layer, i.chunk)
        computes = i.mode is AttentionMode.COMPUTE
        memory.need((i.choice is not None) == (wanted and computes), f"choice: {i.choice}")
        memory.need(computes or not i.chooses, "only what attends chooses")
        if i.means is not None:
            self._of_layer(i.means, Kind.MEANS, i.layer)
            if i.write_kv is not None:
                memory.write(i.means, Content("means", i.layer, i.chunk))
        if i.choice is None:
            memory.need(not i.chooses, "what is chosen is kept")
            return
        self._of_layer(i.choice, Kind.CHOICE, i.layer)
        memory.stream_pages(i.prefix, i.layer, i.chunk, backward=False)
        if not i.chooses:
            memory.read(i.choice, "choice", i.layer, i.chunk)
            return
        memory.need((i.layer, i.chunk) not in self.chosen, "the cell chooses twice")
        memory.need(i.means is not None, "no means to choose by")
        for earlier in range(i.chunk):
            memory.read(i.means or "", "means", i.layer, earlier)
        memory.write(i.choice, Content("choice", i.layer, i.chunk))
        self.chosen.add((i.layer, i.chunk))

    def _must_choose(self, layer: int, chunk: int) -> bool:
        """Are there whole pages between sinks and recent tokens, and a budget for them?"""
        sparse = self.program.schedule.sparse
        if sparse is None or self.program.model.layers[layer].window is not None:
            return False
        page = sparse.page
        recent = max(0, self.program.chunks[chunk][0] - sparse.recent) // page
        return sparse.budget > 0 and recent > -(-sparse.sinks // page)

    def _check_flags(self, i: Forward) -> None:
        need = self.memory.need
        need(0 <= i.layer < len(self.program.model.layers), f"there is no layer {i.layer}")
        if i.mode is AttentionMode.NONE:
            need(i.write_kv is not None, "a cell without output writes K, V or does nothing")
            need(not (i.graph or i.hold or i.attention), "a cell without output has no graph")
        need(not i.hold or not i.graph, "a held cell runs again: its graph is not wanted")
        need(not i.kept or i.graph, "a kept cell needs its graph")
        need(i.activations is None or i.kept, "only a kept graph's activations are saved")
        given = i.mode is AttentionMode.GIVEN
        need(not given or i.attention is not None, "O, LSE are given by no buffer")
        held = i.mode is AttentionMode.HELD
        need(not held or i.attention is None, "O, LSE are held, not in a buffer")

    def _output(self, i: Forward) -> tuple[Pin, ...]:
        """O and LSE of the cell, as the graph will refer to them."""
        if i.mode is AttentionMode.HELD:
            return self._take(self.held, "held", i.layer, i.chunk).pins
        if i.attention is None:
            return ()
        if i.mode is AttentionMode.GIVEN:
            return (self.memory.read(i.attention, "attention", i.layer, i.chunk),)
        return (self.memory.write(i.attention, Content("attention", i.layer, i.chunk)),)

    def _save_activations(self, i: Forward) -> None:
        self.memory.need(i.activations is not None, "a kept graph saves nowhere")
        self.memory.write(i.activations or "", Content("activations", i.layer, i.chunk))

    # -- backward --------------------------------------------------------------------------------

    def _backward(self, i: Backward) -> None:
        self._need_weights(self._group_of(i.layer))
        self._need_sums(self._group_of(i.layer))
        cell = i.layer, i.chunk
        graph = self.graphs.pop(cell, None)
        self.memory.need(graph is not None, "the cell has no graph")
        assert graph is not None
        self.memory.need(cell not in self.backwards, "the cell runs backward twice")
        if graph.forward.kept:
            self._restore(i, graph.forward)
        else:
            self.memory.standing(graph.pins, "the graph")
            loose = i.own_kv is None and i.attention is None and i.activations is None
            self.memory.need(loose, "only a kept graph has its tensors handed to it")
        self._take(self.gradient, "gradient", i.layer + 1, i.chunk)
        self._read_prefix(i.prefix, i.layer, i.chunk)
        wanted = self._must_choose(i.layer, i.chunk)
        self.memory.need((i.choice is not None) == wanted, f"choice: {i.choice}")
        if i.choice is not None:
            self.memory.read(i.choice, "choice", i.layer, i.chunk)
            self.memory.stream_pages(i.prefix, i.layer, i.chunk, backward=True)
        self._accumulate(i)
        self.backwards.add(cell)
        self.gradient[i.layer] = _Register(i.chunk)

    def _group_of(self, layer: int) -> int:
        found = (g for g, (start, stop) in enumerate(self.program.groups) if start <= layer < stop)
        group = next(found, None)
        self.memory.need(group is not None, f"there is no layer {layer}")
        assert group is not None
        return group

    def _restore(self, i: Backward, forward: Forward) -> None:
        """What a kept graph left to buffers is at hand, and nothing else is asked for."""
        memory = self.memory
        memory.need(i.own_kv is not None, "a kept graph left its K, V to a buffer")
        memory.read(i.own_kv or "", "kv", i.layer, i.chunk)
        for name, left, what in (
            (i.attention, forward.attention, "attention"),
            (i.activations, forward.activations, "activations"),
        ):
            memory.need((name is None) == (left is None), f"{what}: {left} forward, {name} here")
            if name is not None:
                memory.read(name, what, i.layer, i.chunk)
        if i.layer in {first for first, _ in self.program.groups}:
            self._take(self.hidden, "hidden", i.layer, i.chunk)

    def _accumulate(self, i: Backward) -> None:
        """The chunk's own dK, dV hold the share of all later chunks and of no other; the earlier
        ones get this chunk's share."""
        memory, later = self.memory, frozenset(range(i.chunk + 1, len(self.program.chunks)))
        own = memory.read(i.own_dkv, "dkv", i.layer, i.chunk).content
        memory.need(own.added == later, f"{own} has the shares of {sorted(own.added)}")
        tier = self._of_layer(i.accumulator, Kind.DKV, i.layer).tier
        for earlier in range(i.chunk):
            total = memory.read(i.accumulator, "dkv", i.layer, earlier).content
            memory.need(total.added == later, f"{total} has the shares of {sorted(total.added)}")
            added = total.added | {i.chunk}
            memory.write(i.accumulator, Content("dkv", i.layer, earlier, added))
        if i.chunk and tier is Tier.HOST:
            memory.stream(names.DKV_BLOCKS, Kind.DKV)

    # -- the end ---------------------------------------------------------------------------------

    def _close(self, group: int) -> None:
        need = self.memory.need
        self._done(group)
        need(group not in self.closed, f"group {group} is closed twice")
        several = self._streams() and self.program.share.rank.layout.devices() > 1
        need((group in self.reduced) == several, f"group {group} leaves with sums of {several}")
        self.closed.add(group)

    def _done(self, group: int) -> None:
        """Everything was added to the group's sums, and they are there."""
        need, stages = self.memory.need, self.program.share.rank.layout.pipeline
        need(group in self.program.own_groups(), f"there is no group {group}")
        for layer in range(*self.program.groups[group]):
            for chunk in range(len(self.program.chunks)):
                done = (layer, chunk) in self.backwards
                need(done, f"group {group} closes before the backward of ({layer}, {chunk})")
        if group == 0:  # the embedding's dW, and with it the head's, is closed with it
            need(len(self.embeddings) == len(self.program.chunks), "an embedding is to come")
        if group == 0 or stages > 1:
            self._need_sums(OUTER)
        self._need_sums(group)

    def finish(self) -> None:
        """Everything ran that makes a step, or an evaluation."""
        need, chunks = self.memory.need, len(self.program.chunks)
        groups, training = self.program.own_groups(), bool(self.closed)
        first, last = 0 in groups, len(self.program.groups) - 1 in groups
        given = chunks * last * (self.program.cut_after is Cut.AFTER_HEAD)
        need(len(self.values) == given, f"values of {sorted(self.values)}, of {chunks} chunks")
        need(len(self.heads) == chunks * last, f"heads of {sorted(self.heads)}, of {chunks} chunks")
        need(not self.graphs, f"no backward for the graphs of {sorted(self.graphs)}")
        gradients = {training} if last else set()
        need(set(self.heads.values()) == gradients, "some heads give a gradient, others do not")
        layers = sum(stop - start for start, stop in map(self.program.groups.__getitem__, groups))
        cells = chunks * layers * training
        need(len(self.backwards) == cells, f"{len(self.backwards)} backward cells of {cells}")
        ends = len(self.embeddings), len(self.closed), len(self.passed)
        beyond = (not first) + (not last)
        wanted = (
            chunks * training * first,
            len(groups) * training,
            beyond * chunks * (1 + training),
        )
        need(ends == wanted, f"{ends} embeddings, closed groups and passages, not {wanted}")
        need(not self.gathered, f"weights of {self.gathered} are never cut again")
        self.memory.finish()
