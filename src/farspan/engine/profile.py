"""Measure a model's costs by running its cells on the meta device with the training interpreter.

The meta device allocates and computes nothing. A cell, one layer on one chunk, runs at two lengths;
the bytes alive at each moment are a line through both. The meter records when attention is called,
and when kernels begin and end: the bytes between these depend on the blocks of keys that a chunk
attends to, and are added where the blocks are known (`farspan.profile.model`).
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from farspan.attention.backends import accumulate_dtype
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.gradients import AccumulatingLinears, GradientAccumulator, uncast
from farspan.engine.interpreter import Interpreter, Layers, Registers, TiledLayers
from farspan.engine.loss import LossHead, StepInputs
from farspan.engine.profile_meter import (
    CellPass,
    CellTape,
    Lengths,
    MarkedContext,
    MarkedKernels,
    Meter,
    NoSums,
    SparedLayers,
    fullest_of,
    grouped_products,
    less_of,
    line_of,
    peak_of,
)
from farspan.engine.tiers import Arena, CopyEngine
from farspan.engine.trace import meta_model, shortened
from farspan.engine.trace_steps import META
from farspan.hf.attention_interface import routed
from farspan.hf.describe import describe_config, describe_shapes, describe_unproven
from farspan.hf.dropout import Draws, drawing
from farspan.hf.fused_layers import fuse, gate_forward
from farspan.hf.indexer import trained_parameters
from farspan.hf.quantized import linear_widths, plain_linears, shape_of
from farspan.hf.stages import CausalLMStages
from farspan.hf.tiled_mlp import Tokenwise, likely_tokenwise
from farspan.hf.unsupported import context_limit, refuse_dropout
from farspan.kernels.launch import launched
from farspan.lazy import without_garbage_collection
from farspan.profile.estimate import estimated, packed
from farspan.profile.model import (
    CellLines,
    KindProfile,
    Line,
    ModelProfile,
    OuterProfile,
    Peak,
    Variant,
    form,
)
from farspan.profile.store import Profiles
from farspan.program.builder import build_program
from farspan.program.program import (
    AttentionMode,
    Backward,
    Embed,
    EmbedBackward,
    Forward,
    Head,
    Instruction,
    Program,
    row_bytes,
)
from farspan.program.residency import Kind
from farspan.spec import (
    Kernels,
    LayerWork,
    ModelSpec,
    RunSpec,
    Schedule,
    Tier,
    UnsupportedError,
)

LENGTHS = 512, 768  # tokens of a cell
# Tokens of a chunk, and of a piece of the head or a tile: two whole pieces and a remainder.
CHUNKS_AND_PIECES = (320, 128), (352, 128), (352, 160)


@dataclass(slots=True)
class _Subject:
    """A model to measure on the meta device, with the objects that its interpreter needs."""

    stages: CausalLMStages
    spec: ModelSpec
    linears: AccumulatingLinears
    fused: bool
    draws: Draws
    arena: Arena = field(default_factory=lambda: Arena(Tier.DEVICE, META))
    heads_first: list[bool] = field(default_factory=list)
    children: Sequence[Sequence[Tokenwise]] = ()  # modules of each layer that run on tiles

    def program(self, tokens: int, *, kept: bool = False, chunks: int = 1) -> Program:
        schedule = Schedule(
            tokens,
            boundary_inputs=Tier.DEVICE,
            kv_block=max(tokens, Schedule().kv_block),
            activations=Tier.DEVICE,
            activation_save_fraction=float(kept),
        )
        return build_program(self.spec, RunSpec(1, tokens * chunks), schedule)

    def interpreter(
        self,
        program: Program,
        meter: Meter,
        *,
        piece: int = 1,
        sums: GradientAccumulator | None = None,
        layers: Layers | None = None,
        after: Callable[[Instruction], None],
        registers: Registers,
    ) -> Interpreter:
        ids = torch.zeros(1, program.run.tokens, dtype=torch.long, device=META)
        self.arena.reserve(max(program.arena_bytes.values()))
        dtype, outer = self.stages.dtype, tuple(self.stages.outer_parameters())
        gradients = sums or NoSums(meter)
        self.linears.gradients = gradients
        return Interpreter(
            stages=self.stages,
            program=program,
            storage=ProgramBuffers(
                program, dict.fromkeys(Tier, self.arena), dtype, CopyEngine(META)
            ),
            inputs=StepInputs(ids, ids, ids, None, draws=self.draws),
            head=LossHead(self.stages, 1, piece, outer, self.fused),
            gradients=gradients,
            after=after,
            layers=layers or Layers(self.stages),
            kernels=MarkedKernels(META, dtype, meter=meter, heads_first=self.heads_first),
            registers=registers,
            make_attention=partial(MarkedContext, meter=meter),
        )

    @contextmanager
    def recording(self, meter: Meter) -> Iterator[None]:
        model = self.stages.model
        with (
            routed(model),
            uncast(model.parameters()),
            drawing(model, self.draws),
            launched(meter.hear),
            meter,
        ):
            yield


@dataclass(frozen=True, slots=True)
class _Run:
    """Measurements of one run of a cell, at one length."""

    forward: CellPass
    backward: CellPass | None
    out: int  # bytes of the layer's output
    saves_input: bool
    sums: int


@dataclass(frozen=True, slots=True)
class _Way:
    """Options for measuring a cell; their combinations have names in profiles (see `name`)."""

    graph: bool = False
    kept: bool = False
    fresh: bool = False
    unread: bool = False
    tiled: bool = False

    def name(self) -> str:
        return form(**asdict(self))

    def lengths(self) -> Lengths:
        """Return the lengths to measure: (tokens,) or, for tiles, (chunk's tokens, tile's)."""
        return CHUNKS_AND_PIECES if self.tiled else tuple((c,) for c in LENGTHS)

    def layers(self, measured: _Subject, layer: int, tile: Sequence[int]) -> Layers:
        if not self.tiled:
            return SparedLayers(measured.stages, measured.linears, self.unread)
        unread = frozenset({(layer, 0)} if self.unread else ())
        add, draws = GradientAccumulator().add, measured.draws
        return TiledLayers(measured.stages, measured.children, tile[0], unread, add, draws)


def _run_cell(measured: _Subject, layer: int, length: Sequence[int], way: _Way) -> _Run:
    tokens, *tile = length
    # A cell between two others, from and to which a state goes, needs the most.
    stages, chunk = measured.stages, int(bool(measured.spec.layers[layer].state))
    program = measured.program(tokens, kept=way.kept, chunks=1 + 2 * chunk)
    parameters = trained_parameters(stages.layers[layer])
    _set_sums(parameters, exist=not way.fresh)
    meter = Meter()
    tape, passes = CellTape(meter), list[CellPass]()
    forward, backward = _of_cell(program, layer, chunk)
    steps = (replace(forward, **_FORWARD, graph=way.graph, kept=way.kept), backward)
    program = replace(program, instructions=steps[: 1 + way.graph])
    blanks = torch.empty(2, 1, tokens, measured.spec.passed(), dtype=stages.dtype, device=META)
    now = Registers()
    now.hidden[layer], now.gradient[layer + 1] = (x.clone() for x in blanks)
    again = {layer: blanks[0]} if way.kept else {}  # a kept graph's input, from its buffer
    entered = weakref.ref(now.hidden[layer].untyped_storage())
    saved: list[bool] = []
    positions = torch.zeros(1, tokens, dtype=torch.long, device=META)
    with routed(stages.model), torch.no_grad():
        now.calls[chunk] = stages.calls(1, positions)

    def after(instruction: Instruction) -> None:
        if isinstance(instruction, Forward):
            saved.append(entered() is not None)
            passes.append(tape.read())
            now.hidden.clear()
            now.hidden.update(again)
            tape.read()
        else:
            passes.append(tape.read())

    layers = way.layers(measured, layer, tile)
    interpreter = measured.interpreter(program, meter, layers=layers, after=after, registers=now)
    with measured.recording(meter):
        interpreter.run()
    sums = sum(p.grad.nbytes for p in parameters if way.fresh and p.grad is not None)
    _set_sums(parameters, exist=False)
    out = tokens * measured.spec.passed() * measured.spec.element_bytes
    return _Run(passes[0], passes[1] if way.graph else None, out, saved[0], sums)


_FORWARD: dict[str, Any] = {"mode": AttentionMode.COMPUTE, "hold": False, "attention": None}


def _of_cell(program: Program, *place: int) -> tuple[Forward, Backward]:
    of = [i for i in program.instructions if isinstance(i, Forward | Backward)]
    of = [i for i in of if (i.layer, i.chunk) == place]
    forward = next(i for i in of if isinstance(i, Forward))
    return forward, next(i for i in of if isinstance(i, Backward))


def _set_sums(parameters: Sequence[nn.Parameter], *, exist: bool) -> None:
    for parameter in parameters:
        wide = accumulate_dtype(parameter.dtype)
        parameter.grad_dtype = wide
        parameter.grad = torch.empty_like(parameter, dtype=wide) if exist else None


# -- lines through runs -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fit:
    """Measured runs of one cell, one for each length. `attended`: bytes of O and LSE per token."""

    lengths: Lengths
    runs: Sequence[_Run]
    attended: int

    def lines(self, *, kept: bool) -> CellLines:
        forward = [run.forward for run in self.runs]
        backward = [run.backward for run in self.runs if run.backward is not None]
        asked = self._moments(forward, "")
        held = 0 if kept else self.attended  # O and LSE, held until the backward
        out = self.runs[0].out // self.lengths[0][0]
        first, returned = self.runs[0], self._mark(backward, "returned")
        return CellLines(
            asked=asked,
            before=asked + self._moments(forward, "asked"),
            at=self._mark(forward, "attends"),
            after=self._moments(forward, "attended", self.attended),
            graph=less_of(self._mark(forward, "end"), held + out),
            saves_input=first.saves_input,
            backward_before=self._moments(backward, "", held),
            backward_at=less_of(self._mark(backward, "attends"), held),
            backward_after=self._moments(backward, "attended"),
            weight_gradients=int(less_of(returned, out)[0]) - first.sums if backward else 0,
            sums=first.sums,
        )

    def _moments(self, passes: Sequence[CellPass], name: str, less: int = 0) -> Peak:
        if not passes:
            return ()
        found = peak_of(self.lengths, [one.moments.get(name, []) for one in passes])
        return tuple(less_of(line, less) for line in found)

    def _mark(self, passes: Sequence[CellPass], name: str) -> Line:
        sizes = [one.marks.get(name, 0) for one in passes] or [0] * len(self.lengths)
        return line_of(self.lengths, sizes)


# -- a model ------------------------------------------------------------------------------------


def measure(config: Mapping[str, Any], variant: Variant, name: str = "") -> ModelProfile:
    """Return the profile of a model, measured from its configuration (the content of a
    config.json). A family that cannot run on the meta device is estimated from the tensors that its
    layers save, with stand-ins for weights. Raises UnsupportedError."""
    name = name or str(config.get("model_type"))
    try:
        found = _of_config(config, variant, name)
    except (UnsupportedError, NotImplementedError, RuntimeError):
        return estimated(_on_stand_ins(config, variant, name), variant.rank)
    if any(layer.state for layer in found.spec.layers):
        # Only values show whether a state is resumed, and what scans save.
        seen, layers = _on_stand_ins(config, variant, name), found.spec.layers
        pairs = zip(seen.layers, layers, strict=True)
        layers = tuple(replace(layer, work=known.work) for layer, known in pairs)
        found = replace(found, spec=replace(seen, layers=layers))
    return found


def _on_stand_ins(config: Mapping[str, Any], variant: Variant, name: str) -> ModelSpec:
    rank, remakes = variant.rank or 0, variant.remakes
    return replace(describe_config(config, variant.dtype, rank, remakes=remakes), name=name)


def _of_config(config: Mapping[str, Any], variant: Variant, name: str) -> ModelProfile:
    dtype, rank = getattr(torch, variant.dtype), variant.rank or 0
    whole = _stages(config, dtype, rank)
    with without_garbage_collection(), grouped_products(whole.model):
        with routed(whole.model):
            kinds = whole.kinds()
        # One layer of each kind is enough: the first layers that include every kind are built.
        last = max(kinds.index(kind) for kind in set(kinds))
        stages = whole
        if not whole.carries:  # else the number of layers decides what each passes on
            with suppress(UnsupportedError):  # some have other fields with an entry per layer
                stages = _stages(shortened(dict(config), last + 1), dtype, rank)
        with routed(stages.model):
            alike = _pattern(stages.kinds()) == _pattern(kinds[: len(stages.layers)])
        stages = stages if alike else whole
        with routed(stages.model):
            found = _measure(stages, variant)
    return _of_whole(whole, kinds, found, name)


def profiles_of_model(model: PreTrainedModel, name: str) -> Profiles:
    """Return profiles of a model with its adapters, measured on a copy without weights."""
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(x): _without_elements(x) for x in tensors}
    memo |= plain_linears(
        model, lambda linear: torch.empty(shape_of(linear.weight), dtype=model.dtype, device=META)
    )
    blank = copy.deepcopy(model, memo)

    def measured(variant: Variant) -> ModelProfile:
        stages = CausalLMStages(blank)
        try:
            with without_garbage_collection(), grouped_products(blank), routed(blank):
                found = _measure(stages, variant)
        except (UnsupportedError, NotImplementedError, RuntimeError):
            stood_in = copy.deepcopy(blank)
            spec = describe_shapes(stood_in, remakes=variant.remakes)
            return estimated(replace(spec, name=name), variant.rank)
        return replace(found, spec=replace(found.spec, name=name))

    def made(variant: Variant) -> ModelProfile:
        found = measured(replace(variant, nf4=False))
        if not variant.nf4:
            return found
        layers = [linear_widths(layer) for layer in CausalLMStages(blank).layers]
        return packed(found, dict(zip(found.kind_of, layers, strict=True)))

    return Profiles({}, name, made=made)


def _without_elements(x: torch.Tensor) -> torch.Tensor:
    blank = torch.empty(x.shape, dtype=x.dtype, device=META)  # whole, even if ranks hold shards
    return nn.Parameter(blank, x.requires_grad) if isinstance(x, nn.Parameter) else blank


def _stages(config: Mapping[str, Any], dtype: torch.dtype, rank: int) -> CausalLMStages:
    model = meta_model(dict(config), dtype, rank)
    refuse_dropout(model)
    return CausalLMStages(model)


def _pattern(kinds: list[Any]) -> list[int]:
    """Return, for each layer, the index of the first layer of the same kind."""
    return [kinds.index(kind) for kind in kinds]


def _of_whole(
    whole: CausalLMStages, kinds: list[Any], profile: ModelProfile, name: str
) -> ModelProfile:
    """Return the whole model's profile, from the profile of its first layers."""
    kind_of = tuple(profile.kind_of[kinds.index(kind)] for kind in kinds)
    parameters = list(whole.model.parameters())
    spec = replace(
        profile.spec,
        name=name,
        layers=tuple(profile.spec.layers[kinds.index(kind)] for kind in kinds),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trained_parameters(whole.model)),
    )
    return replace(profile, spec=spec, kind_of=kind_of)


def _measure(stages: CausalLMStages, variant: Variant) -> ModelProfile:
    linears = AccumulatingLinears(adds=variant.adds)
    kernels = Kernels(fused=variant.fused, remake=variant.remakes)
    fuse(stages, kernels, META, *(linears.forward_of,) * variant.adds, linears=linears)
    spec = describe_unproven(stages)
    # Profiles do not depend on windows, which kernels apply: cells behind a state see their own
    # chunk. The extra layer keeps a graph elsewhere than in the last group.
    layers = (*spec.layers, spec.layers[-1])
    own = tuple(replace(layer, window=1 if layer.state else None) for layer in layers)
    seeing_all = replace(spec, layers=own)
    children = likely_tokenwise(stages) if variant.tiled else ()
    draws = Draws(0, 0, 0, 1, fused=variant.fused)
    measured = _Subject(stages, seeing_all, linears, variant.fused, draws, children=children)
    keys = list(zip(stages.kinds(), spec.layers, strict=True))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    made = [_kind(measured, keys.index(key), variant) for key in numbers]
    kind_of = tuple(numbers[key] for key in keys)
    layers = tuple(replace(spec.layers[i], work=made[kind][1]) for i, kind in enumerate(kind_of))
    return ModelProfile(
        spec=replace(spec, layers=layers),
        kinds=tuple(kind for kind, _ in made),
        kind_of=kind_of,
        outer=_Outside(measured, stages.outer_parameters()).profile(),
        variant=variant,
        longest=context_limit(stages.model),
        learned_positions=_learns_positions(stages),
    )


def _learns_positions(stages: CausalLMStages) -> bool:
    """Return whether the model has an embedding other than that of tokens."""
    tables = [m for m in stages.decoder.modules() if isinstance(m, nn.Embedding)]
    return any(table is not stages.model.get_input_embeddings() for table in tables)


def _ways(measured: _Subject, layer: int, variant: Variant) -> Iterator[_Way]:
    yield _Way()
    spares = variant.fused and _is_skippable(measured, layer)
    if spares:  # proving it takes long: modules run on values
        modules = measured.stages.layers[layer].modules()
        spares = len([m for m in modules if gate_forward(m)]) == 1
    for fresh in (False, True)[: 1 + variant.adds]:
        yield _Way(graph=True, fresh=fresh)
        yield _Way(graph=True, kept=True, fresh=fresh)
        if spares:
            yield _Way(graph=True, fresh=fresh, unread=True)
    if variant.tiled:
        yield _Way(tiled=True)
        for fresh, unread in product((False, True), repeat=2):
            yield _Way(graph=True, fresh=fresh, unread=unread, tiled=True)


def _is_skippable(measured: _Subject, layer: int) -> bool:
    """Return whether the MLP's output is only added to the residual, as no norm follows it."""
    children = measured.stages.layers[layer].children()
    norms = [c for c in children if {p.ndim for p in c.parameters()} == {1}]
    return len(norms) <= 2


def _kind(measured: _Subject, layer: int, variant: Variant) -> tuple[KindProfile, LayerWork]:
    spec, stages = measured.spec, measured.stages
    attended = row_bytes(Kind.ATTENTION, spec, spec.layers[layer], 1)
    cells: dict[str, CellLines] = {}
    plain: list[_Run] = []
    whole: list[_Run] = []
    for way in _ways(measured, layer, variant):
        runs = [_run_cell(measured, layer, length, way) for length in way.lengths()]
        cells[way.name()] = _Fit(way.lengths(), runs, attended).lines(kept=way.kept)
        if way.graph and not plain:
            plain = runs
        if way.kept and not whole:
            whole = runs
    weights = tuple(p.numel() for p in trained_parameters(stages.layers[layer]))
    first = measured.heads_first.pop() if measured.heads_first else False
    measured.heads_first.clear()
    work = _work(measured, layer, plain, variant)
    remade = _backward_traffic(whole) - _backward_traffic(plain)
    work = replace(work, remade_traffic=max(0, remade))
    return KindProfile(weights, first, cells), work


def _work(measured: _Subject, layer: int, runs: Sequence[_Run], variant: Variant) -> LayerWork:
    parameters = list(measured.stages.layers[layer].parameters())
    counts, tokens = runs[0].forward.counts, LENGTHS[0]
    products = [
        (inner, outer) for inner, outer, rows in counts.products for _ in range(rows // tokens)
    ]
    before = sum(rows // tokens for _, _, rows in counts.products[: counts.before])
    forward = line_of(_Way().lengths(), [run.forward.counts.traffic for run in runs])
    return LayerWork(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trained_parameters(measured.stages.layers[layer])),
        products=tuple(products),
        projections=before,
        feed_forward=max(0, len(products) - before - (3 if variant.rank else 1)),
        skippable=_is_skippable(measured, layer),
        forward_traffic=int(forward[1]),
        backward_traffic=_backward_traffic(runs),
    )


def _backward_traffic(runs: Sequence[_Run]) -> int:
    """Return the bytes that a backward's operations other than products move per token."""
    of = [run.backward.counts.traffic for run in runs if run.backward]
    return int(line_of(_Way().lengths(), of)[1])


# -- outside the layers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outside:
    measured: _Subject
    parameters: list[nn.Parameter]

    def profile(self) -> OuterProfile:
        embeds = [self._pass(tokens, Embed(0)) for tokens in LENGTHS]
        hidden = self.measured.spec.passed() * self.measured.spec.element_bytes
        tables = less_of(line_of(_Way().lengths(), [p.marks["end"] for p in embeds]), hidden)
        fresh = self._head(self.parameters)
        by_head = tuple(p.grad is not None for p in self.parameters)
        profile = OuterProfile(
            weights=tuple(p.numel() for p in self.parameters),
            by_head=by_head,
            embed=fullest_of(LENGTHS, embeds),
            tables=tables,
            tables_peak=fullest_of(LENGTHS, [self._tables(tokens) for tokens in LENGTHS]),
            head=self._head(),
            head_fresh=fresh,
            head_once=self._once(()),
            head_once_fresh=self._once(self.parameters),
            evaluation=self._head(gradient=False),
            embed_backward=self._embed_backward(()),
            embed_backward_fresh=self._embed_backward(
                [p for p, begun in zip(self.parameters, by_head, strict=True) if not begun]
            ),
        )
        _set_sums(self.parameters, exist=False)
        return profile

    def _pass(
        self,
        tokens: int,
        step: Instruction,
        *,
        piece: int = 1,
        fresh: Sequence[nn.Parameter] = (),
    ) -> CellPass:
        """Measure an instruction that also allocates the gradient sums of parameters `fresh`."""
        measured = self.measured
        _set_sums(self.parameters, exist=True)
        _set_sums(fresh, exist=False)
        program = replace(measured.program(tokens), instructions=(step,))
        meter = Meter()
        sums = GradientAccumulator()
        found, tape, now = list[CellPass](), CellTape(meter), Registers()
        shape, top = (1, tokens, measured.spec.passed()), len(measured.stages.layers)
        for bank, place in (now.hidden, top), (now.gradient, 0):
            bank[place] = torch.empty(shape, dtype=measured.stages.dtype, device=META)
        made = partial(measured.interpreter, piece=piece, sums=sums, registers=now)
        interpreter = made(program, meter, after=lambda _: found.append(tape.read()))
        with measured.recording(meter):
            interpreter.run()
        return found[0]

    def _tables(self, tokens: int) -> CellPass:
        meter, zeros = Meter(), torch.zeros(1, tokens, dtype=torch.long, device=META)
        with self.measured.recording(meter):
            calls = self.measured.stages.calls_for(zeros, zeros)
        del calls
        return CellTape(meter).read()

    def _head(self, fresh: Sequence[nn.Parameter] = (), *, gradient: bool = True) -> Peak:
        """Return the head's peak bytes as functions of a chunk's and a logits piece's tokens."""
        passes = [
            self._pass(tokens, Head(0, gradient), piece=piece, fresh=fresh)
            for tokens, piece in CHUNKS_AND_PIECES
        ]
        return fullest_of(CHUNKS_AND_PIECES, passes)

    def _once(self, fresh: Sequence[nn.Parameter]) -> Peak:
        return fullest_of(LENGTHS, [self._pass(c, Head(0), piece=c, fresh=fresh) for c in LENGTHS])

    def _embed_backward(self, fresh: Sequence[nn.Parameter]) -> Peak:
        passes = [self._pass(c, EmbedBackward(0), fresh=fresh) for c in LENGTHS]
        return fullest_of(LENGTHS, passes)
