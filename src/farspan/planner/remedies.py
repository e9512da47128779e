"""What would make a plan fit: changes of what was asked, the first that helps of every kind.

Kinds are tried in this order, until so many were tried: what costs nothing and keeps the results,
what costs nothing and does not, what costs money, a shorter context. Two changes at once are tried
where no single one keeps the results, or where adapters alone do not fit, and several machines only
where nothing else keeps the results."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from farspan.formatting import write_tokens
from farspan.memory.host import GIB, MIB
from farspan.planner.machines import machine as find_machine
from farspan.planner.machines import names, with_main_memory
from farspan.planner.request import Optimizer, Question, Remedy, margin_of
from farspan.program.layout import sequence_layout
from farspan.spec import LossKind, Quantization, Reference, RunSpec, Tier

SMALL = 8 * GIB  # below it a whole GiB is much of the memory
MOST_DEVICES = 64
LEAST_CONTEXT = 1024  # tokens
LORA, RANK = "--lora", 16  # of the adapters that are tried
WEIGHTS = f"--weights {Tier.HOST}"
LARGER = 1.1  # of a card's memory, to be another one
TRIES = 250  # of changes: 4 seconds at 16 ms each, for Llama-3-70B on eight cards

Fits = Callable[[Question], bool]
Changes = Iterator[tuple[Remedy, Question]]
Kind = Callable[[Question], Changes]


def remedies_of(question: Question, fits: Fits, tries: int = TRIES) -> tuple[Remedy, ...]:
    """Changes with which something fits, the cheapest first; none where none of the first
    `tries` helps."""
    count = 0
    found: list[Remedy] = []

    def first(changes: Changes) -> None:
        nonlocal count
        for remedy, changed in changes:
            count += 1
            if count > tries:
                return
            if fits(changed):
                # A change that helps alone needs no other.
                if not any(_pairs(remedy) >= _pairs(known) for known in found):
                    found.append(remedy)
                return

    first(_on_host(question))
    if not found:  # main memory is short, too
        first(_on_disk(question))
    near = (
        _stored,
        _batches,
        _adapters,
        _quantized,
        _quantized_on_host,
        _eight_bit,
        _memory,
        _more_on_host,
    )
    for kind in (*near, _devices, _cards, _contexts):
        first(kind(question))
    if not any(remedy.options.startswith(LORA) for remedy in found):
        for kind in (_quantized, _on_host, _quantized_on_host, _memory, _devices, _cards):
            first(_both(_adapters, kind, question))
    exact = (
        *(_both(_on_host, kind, question) for kind in (_devices, _cards)),
        _nodes(question),
        _both(_on_host, _nodes, question),
        _machines(question),
        _both(_on_host, _machines, question),
    )
    for changes in exact:
        if not any(remedy.same for remedy in found):
            first(changes)
    return tuple(found)


def _pairs(remedy: Remedy) -> set[tuple[str, str]]:
    """Its options and their values."""
    words = remedy.options.split()
    return set(zip(words[::2], words[1::2], strict=True))


def _both(first: Kind, second: Kind, question: Question) -> Changes:
    """Each of the first with each of the second."""
    for one, changed in first(question):
        for other, again in second(changed):
            means = "; ".join(filter(None, (one.means, other.means)))
            yield Remedy(f"{one.options} {other.options}", one.same and other.same, means), again


# -- kinds ----------------------------------------------------------------------------------------


def _on_host(question: Question) -> Changes:
    if question.optimizer is Optimizer.ADAMW:
        yield _optimizer(question, Optimizer.HOST, same=True)
    if question.optimizer is Optimizer.ADAMW8BIT or question.weights is Tier.HOST:
        return
    is_there = question.optimizer is not Optimizer.ADAMW
    optimizer = question.optimizer if is_there else Optimizer.HOST
    options = WEIGHTS if is_there else f"--optimizer {optimizer} {WEIGHTS}"
    moved = replace(question, optimizer=optimizer, weights=Tier.HOST)
    yield Remedy(options, True, "weights and gradients go to main memory"), moved


def _on_disk(question: Question) -> Changes:
    """Of states that would else be AdamW's in main memory, of one device."""
    exact = question.optimizer in (Optimizer.ADAMW, Optimizer.HOST)
    if not exact or question.layout.devices() > 1 or question.machine.unified:
        return
    means = "states go to a drive"
    remedy, moved = _optimizer(question, Optimizer.DISK, same=True)
    yield replace(remedy, means=means), moved
    if question.weights is Tier.DEVICE and not question.nf4:
        both = Remedy(f"{remedy.options} {WEIGHTS}", True, f"{means}, weights to main memory")
        yield both, replace(moved, weights=Tier.HOST)


def _more_on_host(question: Question) -> Changes:
    return _both(_on_host, _memory, question)


def _eight_bit(question: Question) -> Changes:
    # Of several ranks, which share the states, they are refused.
    if question.optimizer is Optimizer.ADAMW and question.layout.devices() == 1:
        yield _optimizer(question, Optimizer.ADAMW8BIT, same=False)


def _optimizer(question: Question, optimizer: Optimizer, *, same: bool) -> tuple[Remedy, Question]:
    means = "" if same else "moments of 8 bits"
    remedy = Remedy(f"--optimizer {optimizer}", same, means)
    return remedy, replace(question, optimizer=optimizer)


def _stored(question: Question) -> Changes:
    loss = question.loss
    if loss.reference is Reference.FROZEN and loss.kind is not LossKind.DISTILL:
        remedy = Remedy(f"--reference {Reference.STORED}", True, "its values come with the data")
        yield remedy, replace(question, loss=replace(loss, reference=Reference.STORED))


def _batches(question: Question) -> Changes:
    batch = question.run.batch // 2
    while batch:
        smaller = RunSpec(batch, question.run.tokens)
        # The other halves come before it: their gradients are there.
        changed = replace(question, run=smaller, accumulates=True)
        yield Remedy(f"--batch {batch}", True, "with as many more batches an update"), changed
        batch //= 2


def _adapters(question: Question) -> Changes:
    model, profiles = question.model, question.profiles
    if profiles is None or profiles.rank(RANK) is None:
        return  # what adapters would hold is not known
    if model.trainable < model.parameters or model.hidden <= RANK:
        return
    profile = profiles.of(question.variant(RANK))
    changed = replace(question, model=profile.spec, profile=profile)
    yield Remedy(f"{LORA} {RANK}", False, "adapters are trained, the weights stay"), changed


def _quantized(question: Question) -> Changes:
    """Of the weights beside adapters."""
    profiles, rank = question.profiles, question.adapter_rank()
    if profiles is None or not rank or question.nf4 or question.dtype == "float64":
        return
    if question.layout.devices() > 1:
        return
    asked = replace(question, nf4=True)
    profile = profiles.of(asked.variant(rank))
    changed = replace(asked, model=profile.spec, profile=profile)
    options = f"--quantize {Quantization.NF4}"
    yield Remedy(options, False, "the frozen weights are rounded to four bits"), changed


def _quantized_on_host(question: Question) -> Changes:
    return _both(_quantized, _on_host, question)


def _memory(question: Question) -> Changes:
    machine = question.machine
    whole = machine.host_bytes + machine.host_reserve
    for times in (2, 4, 8):
        text, size = _at_least(times * whole)
        larger = with_main_memory(machine, size)
        yield Remedy(f"--host-memory {text}", True), replace(question, machine=larger)


def _at_least(size: int) -> tuple[str, int]:
    """The bytes as an option takes them, rounded up, and how many they then are: what is said to
    help is what was looked at."""
    unit, name = (MIB, "MiB") if size < SMALL else (GIB, "GiB")
    count = -(-size // unit)
    return f"{count}{name}", count * unit


def _devices(question: Question) -> Changes:
    """Of the one machine."""
    yield from _sharing(question, question.machine.devices)


def _machines(question: Question) -> Changes:
    """Several machines."""
    for remedy, changed in _sharing(question, MOST_DEVICES):
        if changed.layout.devices() > question.machine.devices:
            yield remedy, changed


def _sharing(question: Question, most: int) -> Changes:
    # Of one device are sparse attention and quantised weights.
    if question.sparse is not None or question.nf4:
        return
    model, each = question.model, question.machine.devices
    devices = 2 * question.layout.devices()
    while devices <= min(most, len(model.layers) if model.is_recurrent() else most):
        means = f"of the {each} of a machine"
        if devices > each:
            means = f"{-(-devices // each)} machines of {each}"
        layout = sequence_layout(model, devices)
        yield Remedy(f"--gpus {devices}", True, means), replace(question, layout=layout)
        devices *= 2


def _cards(question: Question) -> Changes:
    """Machines with larger devices, of devices about as large one."""
    here = question.machine
    usual = find_machine(here.name) if here.name in names() else None
    if here.unified or (usual is not None and usual.device_bytes != here.device_bytes):
        return  # a memory that was given would be given of the other, too
    known = here.device_bytes
    for other in sorted(map(find_machine, names()), key=lambda spec: spec.device_bytes):
        if other.device_bytes < LARGER * known:
            continue
        known = other.device_bytes
        if usual is None or usual.host_bytes != here.host_bytes:  # so would this
            host = min(other.host_bytes, here.host_bytes)
            other = replace(other, host_bytes=host, host_reserve=here.host_reserve)
        margin = question.margin
        margin = margin_of(None, other) if margin == margin_of(None, here) else margin
        changed = replace(question, machine=other, margin=margin)
        yield Remedy(f"--machine {other.name}", True, "another card"), changed


def _nodes(question: Question) -> Changes:
    yield from _both(_cards, _devices, question)


def _contexts(question: Question) -> Changes:
    tokens = question.run.tokens // 2
    while tokens >= LEAST_CONTEXT:
        shorter = replace(question, run=RunSpec(question.run.batch, tokens))
        yield Remedy(f"--context {write_tokens(tokens)}", False, "shorter sequences"), shorter
        tokens //= 2
