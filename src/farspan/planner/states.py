"""Bytes on one device of weights, gradients, optimizer states and a batch; seconds of an update."""

from dataclasses import dataclass, replace

from farspan.planner.collectives import fsdp_ranks
from farspan.planner.request import Optimizer, Question
from farspan.program.program import INDEX_BYTES
from farspan.spec import ModelSpec, Reference, Sparse, Tier

MOMENTS = 2  # of AdamW, per element
BLOCK = 256  # elements that share a four-byte scale where a moment has one byte an element
# Gradients and weights pass between the device and states on the host through slots of this many
# elements: while one piece is updated, the next arrives and the last one leaves.
STAGED = 2**24
SLOTS = 2
# Pieces of states on a drive pass through slots of their own: two are read, one is updated and one
# is written, at addresses and in sizes that direct I/O accepts.
DISK_SLOTS = 4
SECTOR = 4096
# Per token: its id, which is its label as well, and the target and position derived from it.
INPUT_BYTES = 3 * INDEX_BYTES


@dataclass(frozen=True, slots=True)
class Sharing:
    """Number of devices that share weights, gradients and optimizer states.

    With tensor parallelism over T devices, each has 1 / T of a chunk's tokens between a layer's
    blocks (attention and MLP), and gathers the tokens of all T devices into each block. So a block
    multiplies, and saves for the backward, all tokens of the chunk.
    """

    ranks: int = 1  # devices that share `.grad`, by rows
    tensor: int = 1  # devices that share the weights of layers, by heads and features
    apart: bool = False  # sums are added over devices, so they are not `.grad`, however wide it is
    stages: int = 1  # of a pipeline, which also share the modules outside the layers

    def own(self, layers: int, outer: int) -> int:
        """Return a device's share of bytes or elements: `layers` in the layers, `outer` outside."""
        return -(-(layers * self.stages + outer) // (self.ranks * self.stages))

    def slice(self, size: int) -> int:
        """Return one device's share of a layer's weights under tensor parallelism."""
        return -(-size // self.tensor)

    def gathered(self, hidden_bytes: int) -> int:
        """Return the bytes of other devices' tokens that a layer's graph saves. `hidden_bytes` is
        the size of this device's hidden states of a chunk."""
        return BLOCKS * (self.tensor - 1) * hidden_bytes


BLOCKS = 2  # attention and MLP, each of which gathers the tokens once
ALONE = Sharing()


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of weights, gradients and optimizer states on one device. `gathered` are weights that
    FSDP gathers for one group and for the modules outside the layers. `accumulators` are the fp32
    sums of their gradients, 0 if `.grad` is wide enough to be the sum."""

    weights: int
    gathered: int
    gradients: int
    accumulators: int
    optimizer: int
    optimizer_on_host: int
    weights_on_host: int = 0
    gradients_on_host: int = 0
    reference: int = 0  # weights of a separate reference model
    reference_on_host: int = 0

    @property
    def on_device(self) -> int:
        """Bytes on the device throughout a step, gradients not included."""
        return self.weights + self.reference + self.gathered + self.optimizer

    @property
    def on_host(self) -> int:
        of_model = self.weights_on_host + self.gradients_on_host + self.reference_on_host
        return self.optimizer_on_host + of_model


def states(question: Question, group_layers: tuple[tuple[int, int], ...]) -> States:
    """Return the bytes of weights, gradients and optimizer states on one device. The weights of a
    frozen reference lie on the same tier as the model's."""
    found = _own_states(question, group_layers)
    if question.loss.reference is not Reference.FROZEN:
        return found
    return replace(found, reference=found.weights, reference_on_host=found.weights_on_host)


def _own_states(question: Question, group_layers: tuple[tuple[int, int], ...]) -> States:
    """Return the `states` of the trained model alone. `group_layers` are the layer ranges of the
    groups. Whole weights on the host, and their gradients, pass through the program's buffers."""
    away = question.weights is Tier.HOST
    if away and not question.layout.cuts_weights():
        return _states_on_host(question)
    model, sharing = question.model, sharing_of(question)
    wide, final = model.accumulate_bytes(), gradient_bytes(question)
    outer, outer_trained = model.outer(), model.outer_trainable()
    layers = [model.layers[slice(*group)] for group in group_layers]
    group = max(sum(layer.work.parameters for layer in of) for of in layers)
    trained = max(sum(layer.work.trainable for layer in of) for of in layers)
    whole = sharing.slice(group) * (sharing.ranks > 1 or away)
    if question.layout.cuts_weights():  # ranks of all stages share the modules outside the layers
        whole += outer
    needs_sum = sharing.apart or final < wide
    own = _own_elements(sharing, model.trainable, outer_trained)
    on_device, on_host = _optimizer_bytes(question, own)
    weights = _own_elements(sharing, model.parameters, outer) * model.element_bytes - _packed(model)
    return States(
        weights=weights * (not away),
        gathered=whole * model.element_bytes,
        gradients=own * final * (not away),
        accumulators=(sharing.slice(trained) + outer_trained) * wide if needs_sum else 0,
        optimizer=on_device,
        optimizer_on_host=on_host,
        weights_on_host=weights * away,
        gradients_on_host=own * final * away,
    )


def _packed(model: ModelSpec) -> int:
    """Return the bytes that quantization saves; every device has all quantized weights."""
    return sum(layer.work.packed for layer in model.layers)


def _states_on_host(question: Question) -> States:
    """States with all weights on the host; `.grad` is the sum over chunks if wide enough."""
    model = question.model
    wide, final = model.accumulate_bytes(), gradient_bytes(question)
    on_device, on_host = _optimizer_bytes(question, model.trainable)
    gradients = model.trainable * (wide + final * (final < wide))
    weights = model.parameters * model.element_bytes - _packed(model)
    return States(0, 0, 0, 0, on_device, on_host, weights, gradients)


def input_bytes(question: Question, tokens: int) -> int:
    """Return the bytes of a batch on a rank with `tokens` of the sequence. A loss of
    log-probabilities adds tensors for the whole sequence: tokens, each token's answer,
    log-probabilities (the model's and the reference's), inputs of the loss, and its gradient."""
    batch, loss, model = question.run.batch, question.loss, question.model
    found = INPUT_BYTES * batch * tokens
    if not loss.is_cut:
        return found
    copies = 3 + (loss.reference is not Reference.NONE)
    each = 2 * INDEX_BYTES + copies * loss.ids * model.accumulate_bytes()
    if loss.ids > 1:  # labels differ from tokens
        each += (2 * loss.ids - 1) * INDEX_BYTES
    return found + each * batch * question.run.tokens


def index_bytes(model: ModelSpec, sparse: Sparse | None) -> int:
    """Return the bytes of a sparse index's projections; every rank has those of all layers."""
    if sparse is None or not sparse.indexed:
        return 0
    choosing = (layer for layer in model.layers if layer.attends() and layer.window is None)
    sizes = ((o.query_heads + o.kv_heads) * o.head_dim * sparse.key_dim(o) for o in choosing)
    return sum(sizes) * model.element_bytes


def sharing_of(question: Question) -> Sharing:
    """Return how a question's devices share the weights."""
    layout = question.layout
    stages = layout.pipeline if layout.fsdp else 1
    return Sharing(fsdp_ranks(question), layout.tensor, layout.devices() > 1, stages)


def _own_elements(sharing: Sharing, elements: int, outer: int) -> int:
    """Return a device's share of `elements`; tensor parallelism does not cut `outer` of them."""
    return sharing.own(sharing.slice(elements - outer), outer)


WIDE = (Optimizer.ADAMW, Optimizer.HOST, Optimizer.DISK)


def gradient_bytes(question: Question) -> int:
    """Return the bytes per element of `.grad`. With AdamW on any tier or with `wide_gradients`,
    `.grad` is as wide as the optimizer states and is itself the sum over chunks."""
    model = question.model
    is_sum = question.wide_gradients or question.optimizer in WIDE
    return model.accumulate_bytes() if is_sum else model.element_bytes


def update_overlaps(question: Question) -> bool:
    """Return whether the host updates weights while the device computes the next step."""
    in_memory = question.weights is Tier.HOST and question.optimizer in (
        Optimizer.HOST,
        Optimizer.DISK,
    )
    alone = question.layout.devices() == 1
    return in_memory and question.overlap and question.update_beside and alone


def update_seconds(question: Question) -> float:
    """Seconds of one update, which reads and writes every byte of gradients and states once. If
    only states are on the host, gradients go there and weights come back during the update."""
    model, machine = question.model, question.machine
    if question.optimizer is Optimizer.NONE or not model.trainable:
        return 0.0
    trained = _own_elements(sharing_of(question), model.trainable, model.outer_trainable())
    final, element = gradient_bytes(question), model.element_bytes
    on_host = question.weights is Tier.HOST
    if question.optimizer in (Optimizer.HOST, Optimizer.DISK) and not on_host:
        # The gradient is read on the device for its norm, and scaled.
        away = trained * _host_update(question, final, element)
        return trained * 3 * final / machine.memory + max(away, drive_seconds(question))
    # The gradient is read for its norm, or scaled if that was known before it left the device, and
    # read again for the update; states are read and written.
    kept = drive_bytes(question) or sum(_optimizer_bytes(question, trained))
    moved = ((2 + on_host) * final + element) * trained + 2 * kept
    there = moved / (machine.host_memory / question.near() if on_host else machine.memory)
    return max(there, drive_seconds(question))


def drive_bytes(question: Question) -> int:
    """Return the bytes of one device's states on the drive; an update reads and writes each once. A
    few sectors per parameter tensor are left out."""
    if question.optimizer is not Optimizer.DISK:
        return 0
    model = question.model
    trained = _own_elements(sharing_of(question), model.trainable, model.outer_trainable())
    return trained * _state_bytes(model)


def drive_seconds(question: Question) -> float:
    """Return the seconds of reading and writing states on the drive that a node's devices share."""
    return 2 * drive_bytes(question) * question.near() / question.machine.disk


def _host_update(question: Question, final: int, element: int) -> float:
    machine, wide = question.machine, question.model.accumulate_bytes()
    shared = machine.host_memory / question.near()
    # Without a master copy, the weight itself goes there and back.
    master, there = (wide, final) if element < wide else (0, final + element)
    touched = 2 * (MOMENTS * wide + master) + 2 * there + 2 * element
    lanes = (
        there / min(machine.evict, shared),
        touched / shared,
        element / min(machine.fetch, shared),
    )
    # Where both tiers are one memory, the processor that updates copies as well.
    return sum(lanes) if machine.unified else max(lanes)


def staged_elements(trainable: int) -> int:
    """Elements in one of the slots through which gradients and weights pass to the host."""
    return min(STAGED, trainable)


def sectors(size: int) -> int:
    return -(-size // SECTOR) * SECTOR


def _optimizer_bytes(question: Question, trained: int) -> tuple[int, int]:
    """Return the bytes of optimizer states on one device and on the host, for the `trained`
    elements of one device.

    Four bytes per parameter tensor, which count its updates, are left out. With moments of one byte
    an element, weights are rounded stochastically and have no master copy; tensors of fewer than
    4,096 elements or of incomplete blocks keep wide moments, and are few.
    """
    model, wide = question.model, question.model.accumulate_bytes()
    staged = staged_elements(trained)
    # Slots of gradients and weights, needed only where these are on the device.
    slots = SLOTS * staged * (wide + model.element_bytes) * (question.weights is Tier.DEVICE)
    match question.optimizer:
        case Optimizer.ADAMW:
            return trained * _state_bytes(model), 0
        case Optimizer.ADAMW8BIT:
            return trained * MOMENTS + trained * MOMENTS * 4 // BLOCK, 0
        case Optimizer.HOST:
            return 0, trained * _state_bytes(model) + slots
        case Optimizer.DISK:
            kept = _state_bytes(model) // wide
            return 0, slots + DISK_SLOTS * kept * sectors(staged * wide)
        case Optimizer.NONE:
            return 0, 0


def _state_bytes(model: ModelSpec) -> int:
    """Return the bytes of states per element: two moments, and a master copy of narrow weights."""
    wide = model.accumulate_bytes()
    return MOMENTS * wide + (wide if model.element_bytes < wide else 0)
