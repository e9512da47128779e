"""The stages outside the layers on phantoms: embedding, rotary tables, head and loss, in pieces."""

from dataclasses import dataclass, field

from farspan.plan.cell.layer import table_width
from farspan.plan.cell.modules import Tables, norm, rotary_tables
from farspan.plan.cell.operations import (
    Gradients,
    Saved,
    activation,
    add,
    as_width,
    fused_loss,
    linear,
    reshape,
    scaled,
)
from farspan.plan.cell.phantom import (
    Found,
    Memory,
    Node,
    Phantom,
    Shape,
    differentiate,
    pointwise,
    record,
)
from farspan.plan.model.architecture import Architecture

SCALED_EMBEDDINGS = ("gemma", "gemma2")
CAPPED_LOGITS = ("gemma2",)
INDEX = 8  # bytes of a token's number or position


def outer_weights(architecture: Architecture) -> dict[str, Shape]:
    """Shapes of the parameters outside the layers."""
    hidden = architecture.hidden
    shapes: dict[str, Shape] = {"embedding": (architecture.vocab, hidden)}
    if architecture.positions:
        shapes["positions"] = (architecture.positions, hidden)
    shapes["norm.weight"] = (hidden,)
    if architecture.norm == "layer":
        shapes["norm.bias"] = (hidden,)
    return shapes if architecture.tied else shapes | {"head": (architecture.vocab, hidden)}


@dataclass(slots=True)
class Outside:
    """The stages of one model on chunks of one size."""

    architecture: Architecture
    memory: Memory
    batch: int
    width: int  # bytes of an element
    weights: dict[str, Phantom] = field(init=False)

    def __post_init__(self) -> None:
        trained = not self.architecture.adapter_rank
        self.weights = {
            name: self.memory.given(shape, self.width, trained=trained)
            for name, shape in outer_weights(self.architecture).items()
        }

    def know(self, known: frozenset[str]) -> None:
        """Sums of these weights' gradients exist already, and are counted elsewhere."""
        for name in known:
            weight = self.weights[name]
            self.memory.sums[id(weight.storage)] = weight

    def begun(self) -> frozenset[str]:
        """Weights whose sums products have begun."""
        made = {n for n, x in self.memory.sums.items() if x.storage.size}
        return frozenset(name for name, x in self.weights.items() if id(x.storage) in made)

    def tables(self, tokens: int) -> Tables | None:
        """What each layer is handed beside its input."""
        if self.architecture.positions:
            blank = self.memory.given((self.batch, tokens, self.architecture.hidden), self.width)
            places = self._positions(tokens)
            add(blank, places)
            return None
        attention = self.architecture.blocks[0].attention
        if not attention.rotary:
            return None
        table = table_width(self.architecture, attention)
        return rotary_tables(self.memory, tokens, table, attention.head_dim, self.width)

    def embed(self, tokens: int) -> tuple[Phantom, Tables | None]:
        """The first layer's input [B, C, hidden] and the tables."""
        x = self._look_up("embedding", (self.batch, tokens))
        if self.architecture.family in SCALED_EMBEDDINGS:
            x = scaled(x)
        if self.architecture.positions:
            places = self._positions(tokens)
            return add(x, places), None
        return x, self.tables(tokens)

    def embed_backward(self, tokens: int) -> dict[str, Phantom]:
        """Gradients of the tables, from one of the first layer's input that others count."""
        gradient = self.memory.given((self.batch, tokens, self.architecture.hidden), self.width)
        self.memory.grad = True
        x, _ = self.embed(tokens)
        self.memory.grad = False
        return {} if x.node is None else self._named(differentiate(x.node, gradient))

    def _positions(self, tokens: int) -> Phantom:
        return self._look_up("positions", (1, tokens))

    def _look_up(self, name: str, tokens: Shape) -> Phantom:
        table = self.weights[name]
        shape, memory = table.shape, self.memory
        out = memory.new((*tokens, shape[1]), self.width)

        def backward(_: Gradients, __: Saved) -> Found:
            return [memory.new(shape, out_width)]

        out_width = self.width
        return record(out, [table], backward)

    def _named(self, found: dict[Node, Phantom]) -> dict[str, Phantom]:
        nodes = {weight.node: name for name, weight in self.weights.items() if weight.node}
        return {nodes[node]: gradient for node, gradient in found.items() if node in nodes}

    # -- head --------------------------------------------------------------------------------------

    def head(
        self, pieces: tuple[int, ...], sums: "PhantomSums", *, gradient: bool
    ) -> Phantom | None:
        """The gradient of the head's input [B, C, hidden], in pieces of so many tokens each."""
        hidden, loss_so_far = self.architecture.hidden, self.memory.new((), INDEX)
        if not gradient:
            for tokens in unlike(pieces):
                piece = self.memory.given((self.batch, tokens, hidden), self.width)
                self._loss(piece)
            return None
        total = self.memory.new((self.batch, sum(pieces), hidden), self.width)
        for tokens in unlike(pieces):
            piece = self.memory.given((self.batch, tokens, hidden), self.width, trained=True)
            self.memory.grad = True
            loss = self._loss(piece)
            self.memory.grad = False
            assert loss.node is not None
            found = differentiate(loss.node, self.memory.new((), 4))
            sums.add(self._named(found))
        loss_so_far.storage.disown()
        return total

    def _loss(self, piece: Phantom) -> Phantom:
        logits = self._logits(piece)
        if self.memory.fused:
            capped = self.architecture.family in CAPPED_LOGITS
            return fused_loss(logits, copied_first=capped)
        full = as_width(logits, max(4, self.width))
        return _cross_entropy(reshape(full, (full.shape[0] * full.shape[1], full.shape[2])))

    def _logits(self, piece: Phantom) -> Phantom:
        places = self.memory.new((1, piece.shape[1]), INDEX)
        x = self._last_norm(piece)
        head = self.weights.get("head") or self.weights["embedding"]
        logits = linear(x, head)
        if self.architecture.family in CAPPED_LOGITS:
            logits = scaled(logits)
            logits = activation(logits, saves_output=True)
            logits = scaled(logits)
        del places
        return logits

    def _last_norm(self, piece: Phantom) -> Phantom:
        tokens, tables = piece.shape[1], None
        if self.architecture.positions:
            tables = self._positions(tokens)
            blank = self.memory.given(piece.shape, self.width)
            add(blank, tables)
        else:
            made = self.tables(tokens)
            out = norm(self.architecture.family, self.weights, "norm", piece)
            del made
            return out
        return norm(self.architecture.family, self.weights, "norm", piece)


def _cross_entropy(logits: Phantom) -> Phantom:
    """log-softmax, and the loss of each row's target."""
    out = pointwise(logits)

    def backward(gradients: Gradients, saved: Saved) -> Found:
        assert gradients[0] is not None
        assert saved[0] is not None
        return [pointwise(gradients[0], saved[0])]

    chances = record(out, [logits], backward, [out])
    shape, width = chances.shape, chances.width

    def spread(gradients: Gradients, _: Saved) -> Found:
        assert gradients[0] is not None
        return [gradients[0].memory.new(shape, width)]

    return record(chances.memory.new((), width), [chances], spread)


@dataclass(slots=True)
class PhantomSums:
    """Sums of weight gradients that a stage begins: born at the first gradient, and then there."""

    width: int
    known: frozenset[str]  # those that exist already
    new: dict[str, Phantom] = field(default_factory=dict)

    def add(self, found: dict[str, Phantom]) -> None:
        for name, gradient in found.items():
            if name not in self.known and name not in self.new:
                self.new[name] = gradient.memory.new(gradient.shape, self.width)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of a stage outside the layers."""

    rise: int
    out: int  # the register it leaves
    tables: int
    new: frozenset[str]  # parameters whose sums it begins


@dataclass(slots=True)
class Stages:
    """Stages outside the layers run on phantoms, each kind once."""

    architecture: Architecture
    batch: int
    width: int
    sums: int  # bytes of an element of a sum of weight gradients
    loss_chunk_size: int
    in_place: bool
    found: dict[tuple[str, int, frozenset[str]], StageBytes] = field(default_factory=dict)

    def get(self, what: str, tokens: int, known: frozenset[str]) -> StageBytes:
        key = what, tokens, known
        if key not in self.found:
            self.found[key] = self._run(what, tokens, known)
        return self.found[key]

    def _run(self, what: str, tokens: int, known: frozenset[str]) -> StageBytes:
        how = self.architecture
        memory = Memory(
            in_place=self.in_place, fused=how.fused, adds=how.adds, sums=self.sums * how.adds
        )
        stages = Outside(self.architecture, memory, self.batch, self.width)
        sums = PhantomSums(self.sums, known)
        if what == "tables":
            tables = stages.tables(tokens)
            return StageBytes(memory.peak, 0, memory.live if tables else 0, frozenset())
        if what == "embed":
            x, tables = stages.embed(tokens)
            out = x.storage.disown()
            return StageBytes(memory.peak, out, memory.live if tables else 0, frozenset())
        if what == "embed backward":
            sums.add(stages.embed_backward(tokens))
            return StageBytes(memory.peak, 0, 0, frozenset(sums.new))
        stages.know(known)
        total = stages.head(self._pieces(tokens), sums, gradient=what == "head")
        out = 0 if total is None else total.storage.size
        return StageBytes(memory.peak, out, 0, frozenset(sums.new) | stages.begun())

    def _pieces(self, tokens: int) -> tuple[int, ...]:
        """The sizes of a head's pieces."""
        full, rest = divmod(tokens, self.loss_chunk_size)
        return (self.loss_chunk_size,) * full + (rest,) * bool(rest)


def unlike(pieces: tuple[int, ...]) -> tuple[int, ...]:
    """The pieces without those that hold what an earlier one held. The first begins the sums of
    weight gradients; of equal ones all from the second on are alike."""
    return tuple(
        size for place, size in enumerate(pieces) if place < 2 or size != pieces[place - 1]
    )
