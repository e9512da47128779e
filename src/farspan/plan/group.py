"""A group of layers: which chunks' graphs it keeps, and the buffers it opens and closes."""

from dataclasses import dataclass, field

from farspan.plan import names
from farspan.plan.grid import are_equal, kept_chunks
from farspan.plan.ledger import Ledger
from farspan.plan.program import Gather, Release
from farspan.plan.residency import Kind, Until, layer_buffers
from farspan.plan.sizes import (
    activation_cell_bytes,
    activation_row_bytes,
    choice_cell_bytes,
    means_cell_bytes,
)
from farspan.spec import Tier


@dataclass(slots=True)
class Group:
    """Group `index` of a program under construction."""

    ledger: Ledger
    index: int
    layers: range = field(init=False)
    top: int = field(init=False)  # the last of the layers
    is_last: bool = field(init=False)
    is_stage: bool = field(init=False)  # of a pipeline
    stays_open: bool = field(init=False)  # its K, V are there from the first pass to the backward
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
        self.chunks = range(len(ledger.chunks))
        self.graphs = kept_chunks(ledger.schedule.activations_kept, ledger.chunks)
        if self.is_last and len(self.layers) == 1:
            self.graphs = range(0)  # the backward follows at once: there is nothing to save

    def gather(self) -> None:
        """Have the weights whole, unless they are: once for each pass, or once for two that follow
        each other."""
        layout = self.ledger.share.rank.layout
        if layout.fsdp and layout.devices() > 1 and not self.gathered:
            self.ledger.emit(Gather(self.index, self.with_outer()))
            self.gathered = True

    def release(self) -> None:
        if self.gathered:
            self.ledger.emit(Release(self.index, self.with_outer()))
            self.gathered = False

    def with_outer(self) -> bool:
        """Whether what is outside the layers is gathered too. All stages of a pipeline share it,
        so all gather it, at the beginning: those between the ends too, which do not need it."""
        return self.is_stage or self.index == 0 or self.is_last

    def open_first(self) -> None:
        """Buffers that the first pass writes."""
        ledger, schedule = self.ledger, self.ledger.schedule
        kept = kept_chunks(schedule.attention_kept, ledger.chunks)
        for layer in self.layers:
            ledger.allocate(names.kv(layer), Kind.KV, layer)
            if self.kv_goes_home():
                ledger.allocate(names.kv_home(layer), Kind.KV, layer, tier=Tier.HOST)
            if kept and not (self.is_last and layer == self.top):
                ledger.allocate(names.attention(layer), Kind.ATTENTION, layer, kept)
            self._open_activations(layer)
            self._open_pages(layer)
        if self.is_stage and self.index > 0:
            ledger.allocate(names.x(self.index), Kind.X, self.index)
        if self.is_last:
            self._open_head_input()
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
        """Where a layer's pages have their mean keys, and what its queries chose is kept."""
        ledger, sparse = self.ledger, self.ledger.schedule.sparse
        choosing = self.choosing(layer)
        if sparse is None or not choosing:
            return
        spec, batch = ledger.model.layers[layer], ledger.run.batch
        tokens = ledger.chunks[0][1]
        most = sparse.width(ledger.chunks[-1][0])
        for name, kind, cells, size in (
            (
                names.means(layer),
                Kind.MEANS,
                self.chunks,
                means_cell_bytes(ledger.model, spec, batch, tokens, sparse),
            ),
            (
                names.choice(layer),
                Kind.CHOICE,
                choosing,
                choice_cell_bytes(spec, batch, tokens, most, sparse.page),
            ),
        ):
            ledger.allocate_cells(name, kind, layer, cells, size)

    def choosing(self, layer: int) -> range:
        """Chunks whose queries choose pages in this layer: those of which some lie between sinks
        and recent tokens. A layer with a window is exact as it is."""
        ledger, sparse = self.ledger, self.ledger.schedule.sparse
        if sparse is None or ledger.model.layers[layer].window is not None:
            return range(0)
        first = sum(sparse.width(start) == 0 for start, _ in ledger.chunks)
        return range(first, len(ledger.chunks))

    def _open_head_input(self) -> None:
        if self.graphs:
            ledger = self.ledger
            boundary = self.index + 1
            ledger.allocate(names.x(boundary), Kind.X, boundary, self.graphs)

    def open_attention_of_open_group(self) -> None:
        ledger, schedule = self.ledger, self.ledger.schedule
        kept = kept_chunks(schedule.attention_kept, ledger.chunks)
        others = range(kept[0]) if kept else self.chunks
        if schedule.attention_open and others:
            for layer in self.layers[:-1]:
                name = names.attention_open(layer)
                ledger.allocate(name, Kind.ATTENTION, layer, others)

    def cell_bytes(self, layer: int, chunk: int = 0) -> int:
        """Bytes of a chunk's cell of kept activations; of equal chunks a ragged last one has a
        full one. O and LSE are in it where no attention buffer is sure to hold them; the layer's
        input where no boundary does."""
        ledger = self.ledger
        start, stop = ledger.share.cells[0 if are_equal(ledger.chunks) else chunk]
        spec, batch = ledger.model.layers[layer], ledger.run.batch
        within, sharers = self._with_attention(layer), self._sharers()
        size = activation_cell_bytes(ledger.model, spec, batch, stop - start, within, sharers)
        return size + batch * (stop - start) * self._input_row(layer)

    def cell_row(self, layer: int) -> int:
        """By how much it is smaller a token that its chunk is shorter."""
        ledger = self.ledger
        if are_equal(ledger.chunks):
            return 0
        spec, within = ledger.model.layers[layer], self._with_attention(layer)
        row = activation_row_bytes(ledger.model, spec, within, self._sharers())
        return ledger.run.batch * (row + self._input_row(layer))

    def _sharers(self) -> int:
        """Ranks that share the heads."""
        layout = self.ledger.share.rank.layout
        return layout.ulysses * layout.tensor

    def _with_attention(self, layer: int) -> bool:
        schedule, is_outermost = self.ledger.schedule, self.is_last and layer == self.top
        return schedule.attention_kept < schedule.activations_kept or is_outermost

    def _input_row(self, layer: int) -> int:
        """Bytes of the layer's input in its cell, a token of one sequence."""
        model = self.ledger.model
        inside = model.layers[layer].saves_input and layer != self.layers[0]
        return inside * model.hidden * model.element_bytes

    def kv_goes_home(self) -> bool:
        schedule = self.ledger.schedule
        kept = schedule.kv_kept and not self.stays_open
        return kept and schedule.kv is Tier.DEVICE and schedule.kv_home is Tier.HOST

    def close_first(self) -> None:
        """After the first pass of a group that is not the last: its K, V go."""
        self.release()
        for layer in self.layers:
            self.free_layer(layer, Until.FIRST)
            if not self.ledger.schedule.kv_kept or self.kv_goes_home():
                self.ledger.free(names.kv(layer))

    def close(self) -> None:
        """After the backward."""
        self.release()
        for layer in self.layers:
            self.free_layer(layer, *Until)
        self.ledger.free(names.x(self.index + 1))
        if self.is_stage:
            self.ledger.free(names.x(self.index))

    def free_layer(self, layer: int, *until: Until) -> None:
        """Close the layer's buffers that live no longer than until then."""
        for name in layer_buffers(layer, *until):
            self.ledger.free(name)

    def prefix(self, layer: int) -> str:
        """The buffer K, V of this layer are in now."""
        again = names.kv_again(layer)
        return again if self.ledger.is_open(again) else names.kv(layer)

    def attention_home(self, layer: int, chunk: int) -> str | None:
        """The buffer that keeps O, LSE of this cell, if one does."""
        for name in (names.attention(layer), names.attention_open(layer)):
            if self.ledger.is_open(name) and chunk in self.ledger.covered[name]:
                return name
        return None
