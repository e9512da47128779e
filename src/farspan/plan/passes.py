"""The passes of one group over its chunks: first, rebuild, backward.

        layers                      first pass      chunk by chunk upwards through the group
      ^  +--+--+--+--+  group 1     rebuild         the same, only to have K, V again
      |  |  |  |  |  |              backward        chunk by chunk from the last, each chunk forward
      |  +--+--+--+--+  group 0                     with its autograd graph and then back down
      |  |  |  |  |  |
      +--+--+--+--+--+-> chunks

Two savings hold everywhere. The last chunk's own cells are not run before the backward starts
with them. And the top layer of a group has no reader before its backward, so a pass that is only
there for K, V ends in it with AttentionMode.NONE.
"""

from dataclasses import dataclass

from farspan.plan import names
from farspan.plan.group import Group
from farspan.plan.program import (
    AttentionMode,
    Backward,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Head,
    Load,
    LoadGradient,
    Receive,
    Send,
    Store,
    StoreGradient,
)
from farspan.plan.residency import Kind, Until
from farspan.spec import Tier


@dataclass(slots=True)
class GroupPasses(Group):
    """Writes the passes of a group into its ledger."""

    entered: str = ""  # where the chunk's input is

    # -- the group's input and output ---

    def enter(self, chunk: int) -> None:
        """hidden[first layer] of the chunk."""
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
        """Keep hidden[top + 1] of the chunk, or hand it on."""
        if self.is_stage and not self.is_last:
            self.ledger.emit(Send(self.top + 1, chunk))
            return
        boundary = names.x(self.index + 1)
        place = self._x_place(boundary, names.X_OUT)
        self.ledger.emit(Store(self.top + 1, chunk, place))
        self._evict(place, boundary, chunk)

    def enter_backward(self, chunk: int) -> None:
        """gradient[top + 1] of the chunk: from the head, or from the group above."""
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
        """gradient[first layer] of the chunk takes the place of the group's input."""
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
        return ledger.turn(ledger.few(ring)) if ledger.schedule.x is Tier.HOST else boundary

    # -- passes ---

    def first(self) -> None:
        self.gather()
        self.open_first()
        for chunk in self.chunks:
            kept = chunk in self.graphs
            is_read = not self.is_last or kept
            if chunk == self.chunks[-1] and not is_read:
                continue
            self.enter(chunk)
            for layer in self.layers:
                only_kv = layer == self.top and not is_read
                self.forward(layer, chunk, only_kv=only_kv, kept=kept)
            if is_read:
                self.leave(chunk)
        if not self.stays_open:
            self.close_first()

    def evaluate(self) -> None:
        """Forward only."""
        self.gather()
        self.open_first()
        for chunk in self.chunks:
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
        """Have the group's K, V at hand again."""
        ledger, schedule = self.ledger, self.ledger.schedule
        missing = not schedule.kv_kept or self.kv_goes_home()
        if self.stays_open or not missing:
            return
        for layer in self.layers:
            ledger.allocate(names.kv_again(layer), Kind.KV, layer)
        if self.kv_goes_home():
            for layer in self.layers:
                for chunk in self.chunks:
                    ledger.emit(Fetch(names.kv_home(layer), names.kv_again(layer), chunk))
                    ledger.written[names.kv_again(layer)].add(chunk)
                ledger.free(names.kv_home(layer))
            return
        self.gather()
        self.open_attention_of_open_group()
        for chunk in self.chunks:
            if chunk == self.chunks[-1] and chunk not in self.graphs:
                continue
            self.enter(chunk)
            for layer in self.layers[:-1]:
                self.forward(layer, chunk)
            self.forward(self.top, chunk, only_kv=True)

    def backward(self) -> None:
        ledger = self.ledger
        self.gather()
        for layer in self.layers:
            ledger.allocate(names.dkv(layer), Kind.DKV, layer)
        ledger.clear(names.dkv(self.top))
        for chunk in reversed(self.chunks):
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
    ) -> None:
        """One forward cell with its copies. What is already there decides the mode."""
        ledger, prefix = self.ledger, self.prefix(layer)
        home = self.attention_home(layer, chunk)
        mode = AttentionMode.COMPUTE
        if only_kv:
            mode, home = AttentionMode.NONE, None
        elif held:
            mode, home = AttentionMode.HELD, None
        elif home is not None and chunk in ledger.written[home]:
            mode = AttentionMode.GIVEN
        elif graph or hold:
            home = None  # the backward follows at once: nothing to keep
        attention = None if home is None else self._attention_place(home)
        if home is not None and attention is not None and mode is AttentionMode.GIVEN:
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
            )
        )
        if write is not None:
            self._evict_kv(layer, chunk, write, prefix)
        if home is not None and attention is not None and mode is AttentionMode.COMPUTE:
            self._evict(attention, home, chunk)
            ledger.written[home].add(chunk)
        if cells is not None:
            self._evict(cells, names.activations(layer), chunk)

    def _means(self, layer: int, *, wanted: bool) -> str | None:
        name = names.means(layer)
        return name if wanted and self.ledger.is_open(name) else None

    def _choice(self, layer: int, chunk: int, mode: AttentionMode) -> tuple[str | None, bool]:
        """Where the cell's choice of pages is or goes, and whether it is made here."""
        if mode is not AttentionMode.COMPUTE or chunk not in self.choosing(layer):
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
        """One backward cell with its copies; `kept` when the first pass kept its graph."""
        ledger, on_host = self.ledger, self.ledger.schedule.kv is Tier.HOST
        prefix, dkv = self.prefix(layer), names.dkv(layer)
        attention = cells = own_kv = None
        if kept:
            own_kv = ledger.turn(names.KV_OWN) if on_host else prefix
            self._fetch(prefix, own_kv, chunk)
            home = self.attention_home(layer, chunk)
            # What is kept only while the group is open was not there when the first pass ran.
            was_open = self.stays_open or home == names.attention(layer)
            if home is not None and was_open and chunk in ledger.written[home]:
                attention = self._attention_place(home)
                self._fetch(home, attention, chunk)
            cells = self._activations_place(layer)
            self._fetch(names.activations(layer), cells, chunk)
        if chunk == self.chunks[-1] and layer > self.layers[0]:
            # While this cell computes, the zeros for the next one's sums go to host.
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
        if self.ledger.schedule.attention is Tier.HOST:
            return self.ledger.turn(self.ledger.attention_slots())
        return home

    def _activations_place(self, layer: int) -> str:
        on_host = self.ledger.schedule.activations is Tier.HOST
        return self.ledger.turn(names.ACTIVATIONS) if on_host else names.activations(layer)

    def _kv_place(self, prefix: str, chunk: int) -> str | None:
        if chunk in self.ledger.written[prefix]:
            return None
        on_host = self.ledger.schedule.kv is Tier.HOST
        return self.ledger.turn(names.KV_OWN) if on_host else prefix

    def _evict_kv(self, layer: int, chunk: int, write: str, prefix: str) -> None:
        if write != prefix:
            self.ledger.emit(Evict(write, prefix, chunk))
        elif self.kv_goes_home() and prefix == names.kv(layer):
            self.ledger.emit(Evict(prefix, names.kv_home(layer), chunk))
        self.ledger.written[prefix].add(chunk)
