"""A group of layers, its buffers, and its three passes over the chunks.

        layers                      first pass      chunk by chunk upwards through the group
      ^  +--+--+--+--+  group 1     rebuild         the same, only to have K, V again
      |  |  |  |  |  |              backward        chunk by chunk from the last, each chunk forward
      |  +--+--+--+--+  group 0                     with its autograd graph and then back down
      |  |  |  |  |  |
      +--+--+--+--+--+-> chunks

Two kinds of cells are left out, unless the step is cut (`Cut`). The last chunk does not run before
the backward starts with it. And nothing reads the output of a group's top layer before its
backward, so a pass that only produces K, V ends there with AttentionMode.NONE.
"""

from dataclasses import dataclass, field

from farspan.program import buffer_names as names
from farspan.program.layout import are_equal, kept_chunks, streams
from farspan.program.ledger import Ledger
from farspan.program.program import (
    MODE_COMPUTE,
    MODE_GIVEN,
    MODE_HELD,
    MODE_NONE,
    AttentionMode,
    Backward,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Gather,
    Head,
    Load,
    LoadGradient,
    Receive,
    Release,
    Send,
    Store,
    StoreGradient,
    activation_cell_bytes,
    activation_row_bytes,
    choice_cell_bytes,
    means_cell_bytes,
)
from farspan.program.residency import Kind, Until, layer_buffers
from farspan.spec import DEVICE, HOST, Cut


@dataclass(slots=True)
class Group:
    """A group of layers in a program under construction, and the group's buffers."""

    ledger: Ledger
    index: int
    layers: range = field(init=False)
    top: int = field(init=False)  # the last of the layers
    is_last: bool = field(init=False)
    is_stage: bool = field(init=False)  # of a pipeline
    streams: bool = field(init=False)  # its weights are streamed from main memory
    stays_open: bool = field(init=False)  # its K, V live from the first pass to the backward
    chunks: range = field(init=False)
    graphs: range = field(init=False)  # chunks whose graphs the first pass keeps
    gathered: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        ledger = self.ledger
        self.layers = range(*ledger.groups[self.index])
        self.top = self.layers[-1]
        self.is_last = self.index == len(ledger.groups) - 1
        self.is_stage = ledger.share.rank.layout.pipeline > 1
        self.stays_open = self.is_last or self.is_stage
        self.streams = streams(ledger.schedule, ledger.share.rank.layout)
        self.chunks = range(len(ledger.chunks))
        self.graphs = kept_chunks(ledger.schedule.activation_save_fraction, ledger.chunks)
        # The backward of a last group of one layer follows at once, so nothing is saved.
        if not self.keeps() or (self.is_last and len(self.layers) == 1):
            self.graphs = range(0)

    def keeps(self) -> bool:
        """Return whether the group is one of those that keep activations."""
        return self.index in self.ledger.keeping

    def gather(self, then: int | None) -> None:
        """Gather the group's weights, unless the pass before this one has gathered them. Weights in
        main memory are fetched instead, with those of group `then`, whose pass is next."""
        if self.streams:
            self._fetch_weights(then)
            return
        layout = self.ledger.share.rank.layout
        if layout.cuts_weights() and not self.gathered:
            self.ledger.emit(Gather(self.index, self.with_outer()))
            self.gathered = True

    def _fetch_weights(self, then: int | None) -> None:
        fetched = self.ledger.fetched
        for index in (self.index, then):
            if index is not None and fetched.get(index % 2) != index:
                self.ledger.emit(Gather(index, outer=not fetched))
                fetched[index % 2] = index

    def _open_weight_gradients(self) -> None:
        """Fetch the group's gradient sums into device buffers, if weights are in main memory."""
        if self.streams:
            if self.stays_open:  # the first group whose backward runs here
                self.ledger.allocate_group_slots(Kind.WEIGHT_GRADIENTS)
            self.ledger.emit(Gather(self.index, outer=self.stays_open, gradients=True))

    def release(self) -> None:
        if self.gathered:
            self.ledger.emit(Release(self.index, self.with_outer()))
            self.gathered = False

    def with_outer(self) -> bool:
        """Return whether modules outside the layers are gathered with the group. All pipeline
        stages share and gather these modules, even stages in the middle, which do not use them."""
        if self.ledger.model.embeds:
            return True
        return self.is_stage or self.index == 0 or self.is_last

    def open_first(self) -> None:
        ledger, schedule = self.ledger, self.ledger.schedule
        kept = kept_chunks(schedule.attention_save_fraction, ledger.chunks)
        for layer in self.layers:
            ledger.allocate(names.kv(layer), Kind.KV, layer)
            if self.kv_goes_home():
                ledger.allocate(names.kv_home(layer), Kind.KV, layer, tier=HOST)
            if kept and not (self.is_last and layer == self.top):
                ledger.allocate(names.attention(layer), Kind.ATTENTION, layer, kept)
            self._open_activations(layer)
            self._open_pages(layer)
        if self.is_stage and self.index > 0:
            ledger.allocate(names.x(self.index), Kind.X, self.index)
        if self.is_last and self.graphs:
            boundary = self.index + 1
            ledger.allocate(names.x(boundary), Kind.X, boundary, self.graphs)
        if self.stays_open:
            self.open_attention_of_open_group()
        else:
            boundary = self.index + 1
            ledger.allocate(names.x(boundary), Kind.X, boundary)

    def _open_activations(self, layer: int) -> None:
        if self.graphs:
            self.ledger.allocate_cells(
                names.activations(layer),
                Kind.ACTIVATIONS,
                layer,
                self.graphs,
                self.cell_bytes(layer, self.graphs[0]),
                cell_row=self.cell_row(layer),
            )

    def _open_pages(self, layer: int) -> None:
        ledger, sparse = self.ledger, self.ledger.schedule.sparse
        choosing = self.choosing(layer)
        if sparse is None or not choosing:
            return
        spec, batch = ledger.model.layers[layer], ledger.run.batch
        tokens = ledger.chunks[0][1]
        most = sparse.width(ledger.chunks[-1][0])
        size = means_cell_bytes(ledger.model, spec, batch, tokens, sparse)
        ledger.allocate_cells(names.means(layer), Kind.MEANS, layer, self.chunks, size)
        size = choice_cell_bytes(spec, batch, tokens, most, sparse.query_tokens)
        ledger.allocate_cells(names.choice(layer), Kind.CHOICE, layer, choosing, size)

    def choosing(self, layer: int) -> range:
        """Return the chunks whose queries choose pages in this layer: those with pages between
        sinks and recent tokens. In a layer with a window no chunk chooses."""
        ledger = self.ledger
        return ledger.choosing if ledger.model.layers[layer].window is None else range(0)

    def open_attention_of_open_group(self) -> None:
        ledger, schedule = self.ledger, self.ledger.schedule
        kept = kept_chunks(schedule.attention_save_fraction, ledger.chunks)
        others = range(kept[0]) if kept else self.chunks
        if schedule.attention_open and others:
            for layer in self.layers[:-1]:
                name = names.attention_open(layer)
                ledger.allocate(name, Kind.ATTENTION, layer, others)

    def cell_bytes(self, layer: int, chunk: int = 0) -> int:
        """Return the bytes of activations that the layer saves for one chunk; if chunks are equal,
        a shorter last chunk takes as many. O and LSE count unless another buffer certainly holds
        them. The layer's input counts unless it is saved between groups."""
        ledger = self.ledger
        start, stop = ledger.share.cells[0 if are_equal(ledger.chunks) else chunk]
        spec, batch = ledger.model.layers[layer], ledger.run.batch
        within, sharers = self._with_attention(layer), self._sharers()
        size = activation_cell_bytes(ledger.model, spec, batch, stop - start, within, sharers)
        return size + batch * (stop - start) * self._input_row(layer)

    def cell_row(self, layer: int) -> int:
        """Return the bytes per token of a cell's saved tensors; 0 if all cells get equal bytes."""
        ledger = self.ledger
        if are_equal(ledger.chunks):
            return 0
        spec, within = ledger.model.layers[layer], self._with_attention(layer)
        row = activation_row_bytes(ledger.model, spec, within, self._sharers())
        return ledger.run.batch * (row + self._input_row(layer))

    def _sharers(self) -> int:
        layout = self.ledger.share.rank.layout
        return layout.ulysses * layout.tensor

    def _with_attention(self, layer: int) -> bool:
        schedule, is_outermost = self.ledger.schedule, self.is_last and layer == self.top
        return schedule.attention_save_fraction < schedule.activation_save_fraction or is_outermost

    def _input_row(self, layer: int) -> int:
        """Return the bytes per token and sequence of the layer's input if it is saved, else 0."""
        model = self.ledger.model
        inside = model.layers[layer].saves_input and layer != self.layers[0]
        return inside * model.passed() * model.element_bytes

    def kv_goes_home(self) -> bool:
        schedule = self.ledger.schedule
        kept = schedule.kv_kept and not self.stays_open
        return kept and schedule.kv is DEVICE and schedule.kv_home is HOST

    def close_first(self) -> None:
        """Free the buffers that a group does not need between its first pass and its backward."""
        self.release()
        for layer in self.layers:
            self.free_layer(layer, Until.FIRST)
            if not self.ledger.schedule.kv_kept or self.kv_goes_home():
                self.ledger.free(names.kv(layer))

    def close(self) -> None:
        self.release()
        for layer in self.layers:
            self.free_layer(layer, *Until)
        self.ledger.free(names.x(self.index + 1))
        if self.is_stage:
            self.ledger.free(names.x(self.index))

    def free_layer(self, layer: int, *until: Until) -> None:
        """Free the layer's buffers whose lifetime ends at one of the times `until`."""
        for name in layer_buffers(layer, *until):
            self.ledger.free(name)

    def prefix(self, layer: int) -> str:
        """Return the name of the buffer that holds the layer's K, V in the current pass."""
        again = names.kv_again(layer)
        return again if self.ledger.is_open(again) else names.kv(layer)

    def attention_home(self, layer: int, chunk: int) -> str | None:
        """Return the buffer that saves O, LSE of one chunk in this layer, None if none does."""
        for name in (names.attention(layer), names.attention_open(layer)):
            if self.ledger.is_open(name) and chunk in self.ledger.covered[name]:
                return name
        return None


@dataclass(slots=True)
class GroupPasses(Group):
    """A group of layers with the passes that add its instructions to the ledger."""

    entered: str = ""  # buffer of the chunk's input

    # -- the group's input and output ---

    def enter(self, chunk: int) -> None:
        """Emit the instructions that set hidden[first layer] to the group's input for one chunk."""
        if self.index == 0:
            self.ledger.emit(Embed(chunk))
            return
        boundary = names.x(self.index)
        self.entered = self._x_place(boundary, names.X_IN)
        if self.is_stage and chunk not in self.ledger.written[boundary]:
            self.ledger.emit(
                Receive(self.layers[0], chunk), Store(self.layers[0], chunk, self.entered)
            )
            self._evict(self.entered, boundary, chunk)
            self.ledger.written[boundary].add(chunk)
        else:
            self._fetch(boundary, self.entered, chunk)
        self.ledger.emit(Load(self.layers[0], chunk, self.entered))

    def leave(self, chunk: int) -> None:
        """Emit instructions that save the group's output for one chunk, or send it to the next
        stage."""
        if self.is_stage and not self.is_last:
            self.ledger.emit(Send(self.top + 1, chunk))
            return
        boundary = names.x(self.index + 1)
        place = self._x_place(boundary, names.X_OUT)
        self.ledger.emit(Store(self.top + 1, chunk, place))
        self._evict(place, boundary, chunk)
        if self.is_last and self.ledger.cut_after is Cut.AFTER_HEAD:
            self.ledger.emit(Load(self.top + 1, chunk, place))

    def enter_backward(self, chunk: int) -> None:
        """Emit the instructions that get the gradient of the group's output: gradient[top + 1],
        from which the backward of `top`, the group's last layer, starts."""
        if self.is_last and chunk not in self.graphs:
            self.ledger.emit(Head(chunk))
            return
        if self.is_stage and not self.is_last:
            self.ledger.emit(Receive(self.top + 1, chunk, gradient=True))
            return
        boundary = names.x(self.index + 1)
        place = self._x_place(boundary, names.X_OUT)
        self._fetch(boundary, place, chunk)
        if self.is_last:
            self.ledger.emit(Load(self.top + 1, chunk, place), Head(chunk))
        else:
            self.ledger.emit(LoadGradient(self.top + 1, chunk, place))

    def leave_backward(self, chunk: int) -> None:
        """Emit the instructions that pass the gradient of the group's input to the group below, or
        to the embedding."""
        if self.index == 0:
            self.ledger.emit(EmbedBackward(chunk))
            return
        if self.is_stage:
            self.ledger.emit(Send(self.layers[0], chunk, gradient=True))
            return
        boundary = names.x(self.index)
        self.ledger.emit(StoreGradient(self.layers[0], chunk, self.entered))
        self._evict(self.entered, boundary, chunk)

    def _x_place(self, boundary: str, ring: tuple[str, ...]) -> str:
        ledger = self.ledger
        return (
            ledger.turn(ledger.few(ring)) if ledger.schedule.boundary_inputs is HOST else boundary
        )

    # -- passes ---

    def first(self) -> None:
        self.gather(self._above())
        self.open_first()
        for chunk in self.ledger.walked:
            kept = chunk in self.graphs
            is_stored = not self.is_last or kept
            is_read = is_stored or self.ledger.cut_after > Cut.NONE
            has_head = self.is_last and self.ledger.cut_after is Cut.AFTER_HEAD
            if chunk == self.chunks[-1] and not is_read:
                continue
            self.enter(chunk)
            for layer in self.layers:
                only_kv = layer == self.top and not is_read
                drops = layer == self.top and is_read and not is_stored and not has_head
                self.forward(layer, chunk, only_kv=only_kv, kept=kept, drops=drops)
            if is_stored:
                self.leave(chunk)
            if has_head:
                self.ledger.emit(Head(chunk, gradient=False))
        if not self.stays_open:
            self.close_first()
        elif self.ledger.cut_after:
            if self.ledger.cut_after is Cut.AFTER_HEAD:
                self.release()  # the code between the halves gathers its own
            self.ledger.cut = len(self.ledger.instructions)

    def _above(self) -> int | None:
        return None if self.stays_open else self.index + 1

    def _below(self) -> int | None:
        return self.index - 1 if self.index and not self.is_stage else None

    def evaluate(self) -> None:
        """Emit the group's part of a program that only computes a loss."""
        self.gather(self._above())
        self.open_first()
        for chunk in self.ledger.walked:
            self.enter(chunk)
            for layer in self.layers:
                self.forward(layer, chunk)
            if self.is_last:
                self.ledger.emit(Head(chunk, gradient=False))
            else:
                self.leave(chunk)
        for layer in self.layers:
            self.free_layer(layer, *Until)
        self.ledger.free(names.x(self.index))
        self.release()

    def rebuild(self) -> None:
        """Emit copies, or another forward, that bring the group's K, V back for its backward."""
        ledger, schedule = self.ledger, self.ledger.schedule
        missing = not schedule.kv_kept or self.kv_goes_home()
        if self.stays_open or not missing:
            return
        for layer in self.layers:
            ledger.allocate(names.kv_again(layer), Kind.KV, layer)
        if self.kv_goes_home():
            for layer in self.layers:
                for chunk in self.ledger.walked:
                    ledger.emit(Fetch(names.kv_home(layer), names.kv_again(layer), chunk))
                    ledger.written[names.kv_again(layer)].add(chunk)
                ledger.free(names.kv_home(layer))
            return
        self.gather(self._below())
        self.open_attention_of_open_group()
        for chunk in self.ledger.walked:
            if chunk == self.chunks[-1] and chunk not in self.graphs:
                continue
            self.enter(chunk)
            for layer in self.layers[:-1]:
                self.forward(layer, chunk)
            self.forward(self.top, chunk, only_kv=True)

    def backward(self) -> None:
        ledger = self.ledger
        self.gather(self._below())
        self._open_weight_gradients()
        for layer in self.layers:
            ledger.allocate(names.dkv(layer), Kind.DKV, layer)
        ledger.clear(names.dkv(self.top))
        for chunk in reversed(self.ledger.walked):
            self.enter(chunk)
            if chunk in self.graphs:
                self.enter_backward(chunk)
                for layer in reversed(self.layers):
                    self.backward_cell(layer, chunk, kept=True)
            elif ledger.schedule.layer_checkpoint:
                self._backward_layer_by_layer(chunk)
            else:
                for layer in self.layers:
                    self.forward(layer, chunk, graph=True)
                self.enter_backward(chunk)
                for layer in reversed(self.layers):
                    self.backward_cell(layer, chunk)
            self.leave_backward(chunk)
        self.close()

    def _backward_layer_by_layer(self, chunk: int) -> None:
        for layer in self.layers[:-1]:
            self.forward(layer, chunk, hold=True)
        self.forward(self.top, chunk, graph=True)
        self.enter_backward(chunk)
        self.backward_cell(self.top, chunk)
        for layer in reversed(self.layers[:-1]):
            self.forward(layer, chunk, graph=True, held=True)
            self.backward_cell(layer, chunk)

    # -- cells ---

    def forward(
        self,
        layer: int,
        chunk: int,
        *,
        only_kv: bool = False,
        graph: bool = False,
        kept: bool = False,
        hold: bool = False,
        held: bool = False,
        drops: bool = False,
    ) -> None:
        """Emit one forward cell and its copies. If a buffer has the cell's O and LSE, the cell
        reads them instead of computing attention."""
        ledger, prefix = self.ledger, self.prefix(layer)
        home = self.attention_home(layer, chunk)
        mode = MODE_COMPUTE
        if only_kv:
            mode, home = MODE_NONE, None
        elif held:
            mode, home = MODE_HELD, None
        elif home is not None and chunk in ledger.written[home]:
            mode = MODE_GIVEN
        elif graph or hold:
            home = None  # the backward follows at once, so nothing is kept
        attention = None if home is None else self._attention_place(home)
        if home is not None and attention is not None and mode is MODE_GIVEN:
            self._fetch(home, attention, chunk)
        write = self._kv_place(prefix, chunk)
        cells = self._activations_place(layer) if kept else None
        chosen, chooses = self._choice(layer, chunk, mode)
        ledger.emit(
            Forward(
                layer,
                chunk,
                mode,
                prefix,
                write_kv=write,
                attention=attention,
                graph=graph or kept,
                activations=cells,
                kept=kept,
                hold=hold,
                means=self._means(layer, wanted=write is not None or chooses),
                choice=chosen,
                chooses=chooses,
                drops=drops,
            )
        )
        if write is not None:
            self._evict_kv(layer, chunk, write, prefix)
        if home is not None and attention is not None and mode is MODE_COMPUTE:
            self._evict(attention, home, chunk)
            ledger.written[home].add(chunk)
        if cells is not None:
            self._evict(cells, names.activations(layer), chunk)

    def _means(self, layer: int, *, wanted: bool) -> str | None:
        name = names.means(layer)
        return name if wanted and self.ledger.is_open(name) else None

    def _choice(self, layer: int, chunk: int, mode: AttentionMode) -> tuple[str | None, bool]:
        """Return the buffer of the chunk's chosen pages, and whether this cell chooses them."""
        if mode is not MODE_COMPUTE or chunk not in self.choosing(layer):
            return None, False
        name = names.choice(layer)
        done = chunk in self.ledger.written[name]
        self.ledger.written[name].add(chunk)
        return name, not done

    def _fetch(self, home: str, place: str, chunk: int) -> None:
        if home != place:
            self.ledger.emit(Fetch(home, place, chunk))

    def _evict(self, place: str, home: str, chunk: int) -> None:
        if home != place:
            self.ledger.emit(Evict(place, home, chunk))

    def backward_cell(self, layer: int, chunk: int, *, kept: bool = False) -> None:
        """Emit one backward cell and its copies; with `kept`, the first pass saved its graph."""
        ledger, on_host = self.ledger, self.ledger.schedule.kv is HOST
        prefix, dkv = self.prefix(layer), names.dkv(layer)
        attention = cells = own_kv = None
        if kept:
            own_kv = ledger.turn(names.KV_OWN) if on_host else prefix
            self._fetch(prefix, own_kv, chunk)
            home = self.attention_home(layer, chunk)
            # O kept only while the group is open did not exist during the first pass.
            was_open = self.stays_open or home == names.attention(layer)
            if home is not None and was_open and chunk in ledger.written[home]:
                attention = self._attention_place(home)
                self._fetch(home, attention, chunk)
            cells = self._activations_place(layer)
            self._fetch(names.activations(layer), cells, chunk)
        if chunk == self.chunks[-1] and layer > self.layers[0]:
            # While this cell computes, the zeros for the next cell's sums go to the host.
            ledger.clear(names.dkv(layer - 1))
        own_dkv = ledger.turn(names.DKV_OWN) if on_host else dkv
        self._fetch(dkv, own_dkv, chunk)
        ledger.emit(
            Backward(
                layer,
                chunk,
                prefix,
                dkv,
                own_dkv,
                own_kv=own_kv,
                attention=attention,
                activations=cells,
                choice=names.choice(layer) if chunk in self.choosing(layer) else None,
            )
        )

    def _attention_place(self, home: str) -> str:
        if self.ledger.schedule.attention is HOST:
            return self.ledger.turn(self.ledger.attention_slots)
        return home

    def _activations_place(self, layer: int) -> str:
        on_host = self.ledger.schedule.activations is HOST
        return self.ledger.turn(names.ACTIVATIONS) if on_host else names.activations(layer)

    def _kv_place(self, prefix: str, chunk: int) -> str | None:
        if chunk in self.ledger.written[prefix]:
            return None
        on_host = self.ledger.schedule.kv is HOST
        return self.ledger.turn(names.KV_OWN) if on_host else prefix

    def _evict_kv(self, layer: int, chunk: int, write: str, prefix: str) -> None:
        if write != prefix:
            self.ledger.emit(Evict(write, prefix, chunk))
        elif self.kv_goes_home() and prefix == names.kv(layer):
            self.ledger.emit(Evict(prefix, names.kv_home(layer), chunk))
        self.ledger.written[prefix].add(chunk)
