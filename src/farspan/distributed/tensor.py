"""Tensor parallelism with sequence parallelism (arXiv 2205.05198, 4.2): a decoder layer whose
weights are sharded over ranks, on tokens that the ranks share.

Every rank has its own tokens outside of the blocks, attention and MLP: residuals and norms run on
them. A block gathers the tokens of all its peers, computes its own heads or features of them, and
scatters the sums. In the backward gathering becomes scattering and the reverse.

A layer runs in a shell, a shallow copy with stand-ins for its blocks, which is dropped with the
cell. The model keeps its modules; only its parameters become slices.

`check_layers` proves that a layer may be sharded: one process runs its blocks as each rank would,
on all tokens, and adds their outputs. With random weights the sum must be the layer's output. If it
is not, something between the sharded modules mixes heads or features, and the model is refused.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from farspan.distributed.collectives import Communicator, Counts
from farspan.distributed.tensor_plan import (
    INSTEAD,
    LayerPlan,
    TensorBlock,
    TensorPlan,
    WideModule,
    layer_signature,
)
from farspan.spec import UnsupportedError

TOKENS = 1  # the dimension of a hidden state [B, C, h]
# Attributes that count heads, of attention and of its configuration.
HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")

Module = TypeVar("Module", bound=nn.Module)
BlockWrapper = Callable[[str, nn.Module], nn.Module]  # a block's name and what runs on all tokens
# (a wide module's name, a rank's features, their dimension) -> those of all ranks
GatherFeatures = Callable[[str, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model whose layers are sharded over the peers along `tensor`."""

    plan: TensorPlan
    peers: Communicator

    def cut_layers(self, layers: nn.ModuleList) -> None:
        """Replace the parameters that are cut by this rank's slices of them, once."""
        for layer, plan in zip(layers, self.plan.layers, strict=True):
            for name, cut in plan.cuts.items():
                module, leaf = _weight_place(layer, name)
                whole = cast(nn.Parameter, module._parameters[leaf])
                own = cut.slice(whole.detach(), self.peers.index, self.peers.size)
                module._parameters[leaf] = nn.Parameter(own, requires_grad=whole.requires_grad)

    def is_cut(self, name: str) -> bool:
        """Is this parameter of the model cut? If so, its gradient is complete on every rank. The
        gradient of any other parameter is complete when summed over the peers."""
        return name in self.plan.cuts

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's slice of a tensor like the parameter: the tensor itself if it is not cut."""
        cut = self.plan.cuts.get(name)
        return whole if cut is None else cut.slice(whole, self.peers.index, self.peers.size)

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The tensor of which every peer has its slice. All peers call it, name after name."""
        cut = self.plan.cuts.get(name)
        if cut is None:
            return local
        rows = local.detach().movedim(cut.dim, 0).contiguous()
        every = self.peers.gather(rows, [rows.shape[0]] * self.peers.size)
        slices = every.chunk(self.peers.size)
        return cut.join([own.movedim(0, cut.dim) for own in slices]).contiguous()

    def shell(
        self, index: int, layer: Module, counts: Counts, inside: BlockWrapper | None = None
    ) -> Module:
        """Layer `index`, or a shell of it, for own tokens in and out: [B, counts[peer], h].

        What else the layer is called with (position embeddings) is that of the tokens of all peers,
        in their order; attention is asked for with those tokens and this rank's heads. `inside`
        may put something in the place of a block that runs on all tokens, such as tiles.
        """

        def gather(_: str, x: Tensor, dim: int) -> Tensor:
            return _gather(x, self.peers, [x.shape[dim]] * self.peers.size, dim)

        shell = twin(layer)
        for block in self.plan.layers[index].blocks:
            module = layer.get_submodule(block.name)
            inner: nn.Module = local_block(module, block, self.peers.size, self.peers.index, gather)
            if inside is not None:
                inner = inside(block.name, inner)
            bias = module.get_submodule(block.last)._parameters.get("bias")
            shell._modules[block.name] = _SharedBlock(inner, bias, self.peers, tuple(counts))
        return shell


class ModuleProxy(nn.Module):
    """Stands in a module's place: families read attributes of their layers' children."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class _SharedBlock(ModuleProxy):
    """A block that is given a rank's own tokens and gives what belongs to them."""

    def __init__(
        self, inner: nn.Module, bias: nn.Parameter | None, peers: Communicator, counts: Counts
    ) -> None:
        super().__init__(inner)
        self.last_bias = bias
        self._peers, self._counts = peers, counts

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        given = {"hidden_states": arguments[0]} if arguments else keywords
        tokens = _Gather.apply(given["hidden_states"], self._peers, self._counts, TOKENS)
        if arguments:
            out = self.inner(tokens, *arguments[1:], **keywords)
        else:
            out = self.inner(**{**keywords, "hidden_states": tokens})
        own = _ScatterSum.apply(first(out), self._peers, self._counts, TOKENS)
        return with_first(out, own if self.last_bias is None else own + self.last_bias)


class _Wide(nn.Module):
    """Gives a module the features of all ranks, and goes on with the rank's own.

    Backward it is given the gradients of all features too: the module computes the very bits that
    it does uncut, and no rank's part of a sum is rounded to what the module computes in.
    """

    def __init__(
        self, module: nn.Module, wide: WideModule, index: int, gather: GatherFeatures
    ) -> None:
        super().__init__()
        self.inner = module
        self._wide, self._index, self._gather = wide, index, gather

    def forward(self, x: Tensor) -> Tensor:
        dim = x.ndim - len(self._wide.shape)
        size = x.shape[dim]
        place = _WeightPlace(self._wide.name, dim, self._index * size, size, self._gather)
        module = twin(self.inner)
        # Every rank has the gradients of all these weights, and gives those of its own features.
        module.__dict__["_parameters"] = {
            name: p if p is None else _only(p, place.start, size)
            for name, p in self.inner._parameters.items()
        }
        return _Own.apply(module(_Every.apply(x, place)), place)


class _LocalHeads:
    """A configuration that counts one rank's heads."""

    def __init__(self, config: Any, ranks: int) -> None:
        self._config, self._ranks = config, ranks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return value // self._ranks if name in HEADS and isinstance(value, int) else value


def local_block(
    module: nn.Module, block: TensorBlock, ranks: int, index: int, gather: GatherFeatures
) -> nn.Module:
    """A shell of a block whose parameters are slices: its share of the sum, without the bias."""
    shell = twin(module)
    last = twin(module.get_submodule(block.last))
    last.__dict__["_parameters"] = {**last._parameters, "bias": None}
    shell._modules[block.last] = last
    for wide in block.wide:
        shell._modules[wide.name] = _Wide(module.get_submodule(wide.name), wide, index, gather)
    if block.attends:
        own = vars(shell)
        counted = {name: own[name] // ranks for name in HEADS if isinstance(own.get(name), int)}
        own.update(counted)
        if "config" in own:
            own["config"] = _LocalHeads(own["config"], ranks)
    return shell


def twin(module: Module) -> Module:
    """A module whose children may be replaced; they and its parameters are the module's own."""
    shell = copy.copy(module)
    shell.__dict__["_modules"] = dict(module._modules)
    return shell


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def with_first(out: Any, value: Tensor) -> Any:
    return (value, *out[1:]) if isinstance(out, tuple) else value


def _weight_place(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return layer.get_submodule(path), leaf


def _only(weight: Tensor, start: int, size: int) -> Tensor:
    """The same numbers, of which those of some rows alone have a gradient."""
    before, own, after = weight.split([start, size, weight.shape[0] - start - size])
    return torch.cat([before.detach(), own, after.detach()])


@dataclass(frozen=True, slots=True)
class _WeightPlace:
    """A rank's features among those of all ranks, at one module."""

    module: str
    dim: int
    start: int
    size: int
    gather: GatherFeatures

    def own(self, x: Tensor) -> Tensor:
        return x.narrow(self.dim, self.start, self.size).contiguous()

    def every(self, x: Tensor) -> Tensor:
        return self.gather(self.module, x, self.dim)


class _Every(torch.autograd.Function):
    """The features of all ranks; each goes on with the same, so backward its own are complete."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _WeightPlace) -> Tensor:
        ctx.place = place
        return place.every(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.place.own(dout), None


class _Own(torch.autograd.Function):
    """A rank's own features of all; backward, the gradients of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _WeightPlace) -> Tensor:
        ctx.place = place
        return place.own(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.place.every(dout), None


class _Gather(torch.autograd.Function):
    """What all peers have along a dimension; backward, the sums of what is theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Communicator, counts: Counts, dim: int) -> Tensor:
        ctx.call = peers, counts, dim
        return _gather(x, peers, counts, dim)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter_sum(dout, *ctx.call), None, None, None


class _ScatterSum(torch.autograd.Function):
    """The sum over peers of what is this rank's; backward, what all peers have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Communicator, counts: Counts, dim: int) -> Tensor:
        ctx.call = peers, counts, dim
        return _scatter_sum(x, peers, counts, dim)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(dout, *ctx.call), None, None, None


def _gather(x: Tensor, peers: Communicator, counts: Counts, dim: int) -> Tensor:
    every = peers.gather(x.movedim(dim, 0).contiguous(), counts)
    return every.movedim(0, dim).contiguous()


def _scatter_sum(x: Tensor, peers: Communicator, counts: Counts, dim: int) -> Tensor:
    own = peers.scatter_sum(x.movedim(dim, 0).contiguous(), counts)
    return own.movedim(0, dim).contiguous()


# A layer's number, and itself or a shell of it -> what it gives for random hidden states
# [B, C, h], in the dtype of its parameters, with dense attention that keeps no state between calls.
RunLayer = Callable[[int, nn.Module], Tensor]

# Half of float32's digits: products of other shapes and norms in float32 round apart by 1e-7.
PROBE_LIMIT = torch.finfo(torch.float32).eps ** 0.5


@torch.no_grad()
def check_layers(plan: TensorPlan, layers: nn.ModuleList, run: RunLayer) -> None:
    """Raises UnsupportedError where a layer, before it is cut, is not what its parts add up to."""
    known = set()
    for index, (layer, cuts) in enumerate(zip(layers, plan.layers, strict=True)):
        kind = layer_signature(layer, index)
        if kind in known:
            continue
        known.add(kind)
        wide = copy.deepcopy(layer).to(torch.promote_types(_dtype(layer), torch.float32))
        _randomise(wide)
        where = f"{plan.prefix}.{index}"
        error = _distance(_run_sharded(where, wide, cuts, plan.ranks, index, run), run(index, wide))
        if not error <= PROBE_LIMIT:
            raise UnsupportedError(
                f"tensor: {where} ({type(layer).__name__}) changes by {error:.1e} when sharded "
                f"over {plan.ranks} devices by its own plan; {INSTEAD}"
            )


def _run_sharded(
    where: str, layer: nn.Module, cuts: LayerPlan, ranks: int, index: int, run: RunLayer
) -> Tensor:
    shell = twin(layer)
    for block in cuts.blocks:
        shell._modules[block.name] = _AllRanksBlock(
            layer.get_submodule(block.name), block, cuts, ranks
        )
    try:
        return run(index, shell)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        said = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"tensor: {where} ({type(layer).__name__}) fails when sharded over {ranks} devices by "
            f"its own plan ({said}); {INSTEAD}"
        ) from error


@dataclass(slots=True)
class _AllRanksFeatures:
    """What every rank was seen to give a module that reads the features of all."""

    ranks: int
    seen: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def of(self, index: int) -> GatherFeatures:
        def gather(name: str, x: Tensor, dim: int) -> Tensor:
            self.seen[name, index] = x
            every = [self.seen.get((name, rank), x) for rank in range(self.ranks)]
            return torch.cat(every, dim)

        return gather


class _AllRanksBlock(ModuleProxy):
    """A block as all ranks compute it, their outputs added."""

    def __init__(self, module: nn.Module, block: TensorBlock, cuts: LayerPlan, ranks: int) -> None:
        super().__init__(module)
        self._block = block
        self._features = _AllRanksFeatures(ranks)
        self._parts = [
            local_block(
                _sliced(module, block.name, cuts, rank, ranks),
                block,
                ranks,
                rank,
                self._features.of(rank),
            )
            for rank in range(ranks)
        ]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        # Each turn, what one more module in a row reads of the other ranks is what they give it.
        for _ in self._block.wide:
            for part in self._parts:
                part(*arguments, **keywords)
        outs = [part(*arguments, **keywords) for part in self._parts]
        total = first(outs[0])
        for out in outs[1:]:
            total = total + first(out)
        bias = self.inner.get_submodule(self._block.last)._parameters.get("bias")
        return with_first(outs[0], total if bias is None else total + bias)


def _sliced(module: nn.Module, name: str, cuts: LayerPlan, rank: int, ranks: int) -> nn.Module:
    """A shell of a block in which parameters are one rank's slices."""
    shell = twin(module)
    holders: dict[str, nn.Module] = {"": shell}
    shell.__dict__["_parameters"] = dict(module._parameters)
    for key, cut in cuts.cuts.items():
        if not key.startswith(f"{name}."):
            continue
        child, _, leaf = key.removeprefix(f"{name}.").rpartition(".")
        if child not in holders:
            holders[child] = twin(module.get_submodule(child))
            holders[child].__dict__["_parameters"] = dict(holders[child]._parameters)
            shell._modules[child] = holders[child]
        parameters = holders[child]._parameters
        whole = parameters[leaf]
        assert whole is not None
        parameters[leaf] = nn.Parameter(cut.slice(whole.detach(), rank, ranks), False)
    return shell


def _dtype(layer: nn.Module) -> torch.dtype:
    return next(p.dtype for p in layer.parameters() if p.is_floating_point())


def _randomise(layer: nn.Module) -> None:
    """Random weights: a fresh model's zeros and ones would hide what is added twice."""
    for number, p in enumerate(layer.parameters()):
        generator = torch.Generator(p.device).manual_seed(number)
        noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
        p.copy_(noise * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + 0.2 * noise)


def _distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    error = float((found.double() - expected.double()).norm())
    return error / float(expected.double().norm())
