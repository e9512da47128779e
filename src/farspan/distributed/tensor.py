"""Tensor parallelism with sequence parallelism (arXiv 2205.05198, 4.2): the weights of a decoder
layer are sharded over ranks, and so are its tokens.

Outside of the blocks, attention and MLP, every rank has its own tokens, on which residuals and
norms run. A block gathers the tokens of all its peers, computes its own heads or features of them,
and scatters the sums. In the backward, gathering becomes scattering and the reverse.

A layer runs in a shell, a shallow copy with stand-ins for its blocks, which is dropped with the
cell. The model keeps its modules; only its parameters become slices.

`check_layers` proves that a layer may be sharded: one process runs its blocks as each rank would,
on all tokens, and adds their outputs. With random weights the sum must be the layer's output. If it
is not, something between the sharded modules mixes heads or features, and the model is refused.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from farspan.distributed.collectives import Communicator, Counts
from farspan.distributed.tensor_plan import INSTEAD, LayerPlan, TensorBlock, TensorPlan, WideModule
from farspan.hf.dropout import Adjoint
from farspan.hf.edits import layer_signature
from farspan.hf.probe import distance
from farspan.hf.swap import Module, StandIn, put, shell_of
from farspan.spec import UnsupportedError

TOKENS = 1  # the dimension of a hidden state [B, C, h]
# Attributes that count heads, in attention and its configuration.
HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")

BlockWrapper = Callable[[str, nn.Module], nn.Module]  # block's name, module on all tokens
# (a wide module's name, a rank's features, their dimension) -> the features of all ranks
GatherFeatures = Callable[[str, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model whose decoder layers are sharded over the ranks along the axis `tensor`."""

    plan: TensorPlan
    peers: Communicator

    def cut_layers(self, layers: nn.ModuleList) -> None:
        """Replace the layers' sharded parameters by this rank's slices, in place. Call it once."""
        for layer, plan in zip(layers, self.plan.layers, strict=True):
            for name, cut in plan.cuts.items():
                path, _, leaf = name.rpartition(".")
                module = layer.get_submodule(path)
                whole = cast(nn.Parameter, module._parameters[leaf])
                own = cut.slice(whole.detach(), self.peers.index, self.peers.size)
                put([(module._parameters, leaf, nn.Parameter(own, whole.requires_grad))])

    def is_cut(self, name: str) -> bool:
        """Return whether the parameter `name` is sharded, so that its gradient is complete on this
        rank. The gradient of any other parameter must be summed over the peers."""
        return name in self.plan.cuts

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's slice of a tensor in the shape of the parameter `name`, or the whole
        tensor if that parameter is not sharded."""
        cut = self.plan.cuts.get(name)
        return whole if cut is None else cut.slice(whole, self.peers.index, self.peers.size)

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Gather a whole tensor from the slices of peers, which all call this in the same order."""
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
        """Return a copy of layer `index` that reads and returns this rank's tokens, [batch, tokens,
        hidden].

        `counts` are the tokens of each peer. The layer's other inputs (position embeddings) cover
        the tokens of all peers, in their order; attention is called with those tokens and this
        rank's heads. `inside` may replace a block that runs on all tokens, for example by tiles.
        """

        def gather(_: str, x: Tensor, dim: int) -> Tensor:
            return _gather(x, self.peers, [x.shape[dim]] * self.peers.size, dim)

        blocks: dict[str, nn.Module] = {}
        for block in self.plan.layers[index].blocks:
            module = layer.get_submodule(block.name)
            inner: nn.Module = local_block(module, block, self.peers.size, self.peers.index, gather)
            if inside is not None:
                inner = inside(block.name, inner)
            bias = module.get_submodule(block.last)._parameters.get("bias")
            blocks[block.name] = _SharedBlock(inner, bias, self.peers, tuple(counts))
        return shell_of(layer, blocks, own_forward=True)


class _SharedBlock(StandIn):
    """Stand-in for a layer's attention or MLP that gathers all ranks' tokens, runs this rank's
    slice on these, and scatters the sum of the ranks' outputs."""

    def __init__(
        self, inner: nn.Module, bias: nn.Parameter | None, peers: Communicator, counts: Counts
    ) -> None:
        super().__init__(inner)
        self.last_bias = bias
        self._peers, self._counts = peers, counts

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        inputs = {"hidden_states": arguments[0]} if arguments else keywords
        gather, scatter_sum = (
            partial(move, peers=self._peers, counts=self._counts, dim=TOKENS)
            for move in (_gather, _scatter_sum)
        )
        tokens = Adjoint.apply(inputs["hidden_states"], gather, scatter_sum)
        if arguments:
            out = self._module(tokens, *arguments[1:], **keywords)
        else:
            out = self._module(**{**keywords, "hidden_states": tokens})
        own = Adjoint.apply(first(out), scatter_sum, gather)
        return with_first(out, own if self.last_bias is None else own + self.last_bias)


class _Wide(nn.Module):
    """Stand-in for a module in attention or an MLP that needs all ranks' features, such as a norm;
    it returns this rank's part of the outputs.

    The backward gathers the gradients of all features too. So the module computes the same bits as
    in the whole model, and no rank's part of a sum is rounded to the module's dtype.
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
        start = self._index * size

        def own(x: Tensor) -> Tensor:
            return x.narrow(dim, start, size).contiguous()

        def every(x: Tensor) -> Tensor:
            return self._gather(self._wide.name, x, dim)

        # Every rank has the gradients of all these weights; each keeps those of its own features.
        parameters = {
            name: p if p is None else _detach_other_rows(p, start, size)
            for name, p in self.inner._parameters.items()
        }
        module = shell_of(self.inner, parameters=parameters, own_forward=True)
        # All ranks compute the same from all features, so no gradient is a sum over ranks.
        return Adjoint.apply(module(Adjoint.apply(x, every, own)), own, every)


class _LocalHeads:
    """A model's configuration with numbers of heads divided by the number of ranks."""

    def __init__(self, config: Any, ranks: int) -> None:
        self._config, self._ranks = config, ranks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return value // self._ranks if name in HEADS and isinstance(value, int) else value


def local_block(
    module: nn.Module, block: TensorBlock, ranks: int, index: int, gather: GatherFeatures
) -> nn.Module:
    """Return a copy of attention or an MLP (`block`) that runs on this rank's slices of weights.
    The sum of its outputs over ranks is the whole block's output before the last module's bias."""
    last = module.get_submodule(block.last)
    inside: dict[str, nn.Module] = {
        block.last: shell_of(last, parameters={"bias": None}, own_forward=True)
    }
    for wide in block.wide:
        inside[wide.name] = _Wide(module.get_submodule(wide.name), wide, index, gather)
    own, counted = vars(module), dict[str, Any]()
    if block.attends:
        counted = {name: own[name] // ranks for name in HEADS if isinstance(own.get(name), int)}
        if "config" in own:
            counted["config"] = _LocalHeads(own["config"], ranks)
    return shell_of(module, inside, attributes=counted, own_forward=True)


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def with_first(out: Any, value: Tensor) -> Any:
    return (value, *out[1:]) if isinstance(out, tuple) else value


def _detach_other_rows(weight: Tensor, start: int, size: int) -> Tensor:
    """Return `weight`, and pass gradients only to this rank's rows, [start, start + size)."""
    before, own, after = weight.split([start, size, weight.shape[0] - start - size])
    return torch.cat([before.detach(), own, after.detach()])


def _gather(x: Tensor, peers: Communicator, counts: Counts, dim: int) -> Tensor:
    every = peers.gather(x.movedim(dim, 0).contiguous(), counts)
    return every.movedim(0, dim).contiguous()


def _scatter_sum(x: Tensor, peers: Communicator, counts: Counts, dim: int) -> Tensor:
    own = peers.scatter_sum(x.movedim(dim, 0).contiguous(), counts)
    return own.movedim(0, dim).contiguous()


# A layer's number, and the layer or its shell -> its outputs for random hidden states [B, C, h], in
# the dtype of its parameters, with dense attention that keeps no state between calls.
RunLayer = Callable[[int, nn.Module], Tensor]

# Half of float32's digits: products of other shapes and norms in float32 differ by 1e-7.
PROBE_LIMIT = torch.finfo(torch.float32).eps ** 0.5


@torch.no_grad()
def check_layers(plan: TensorPlan, layers: nn.ModuleList, run: RunLayer) -> None:
    """Check on one process that sharding keeps each layer's function, by running whole layers and
    their shards. Raises UnsupportedError if it does not."""
    checked = set()
    for index, (layer, cuts) in enumerate(zip(layers, plan.layers, strict=True)):
        signature = layer_signature(layer, index)
        if signature in checked:
            continue
        checked.add(signature)
        wide = copy.deepcopy(layer).to(torch.promote_types(_dtype(layer), torch.float32))
        _randomise(wide)
        where = f"{plan.prefix}.{index}"
        error = distance(_run_sharded(where, wide, cuts, plan.ranks, index, run), run(index, wide))
        if not error <= PROBE_LIMIT:
            raise UnsupportedError(
                f"tensor: the output of {where} ({type(layer).__name__}) changes by {error:.1e} "
                f"when the model's own plan shards it over {plan.ranks} devices; {INSTEAD}"
            )


def _run_sharded(
    where: str, layer: nn.Module, cuts: LayerPlan, ranks: int, index: int, run: RunLayer
) -> Tensor:
    blocks = {
        block.name: _AllRanksBlock(layer.get_submodule(block.name), block, cuts, ranks)
        for block in cuts.blocks
    }
    shell = shell_of(layer, blocks, own_forward=True)
    try:
        return run(index, shell)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        message = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"tensor: {where} ({type(layer).__name__}) fails when the model's own plan shards it "
            f"over {ranks} devices ({message}); {INSTEAD}"
        ) from error


@dataclass(slots=True)
class _AllRanksFeatures:
    """Stand-in for an all-gather while one process runs the ranks in turn: keeps the features of
    each rank's slice, for modules that need those of all ranks (`_Wide`)."""

    ranks: int
    seen: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def of(self, index: int) -> GatherFeatures:
        def gather(name: str, x: Tensor, dim: int) -> Tensor:
            self.seen[name, index] = x
            every = [self.seen.get((name, rank), x) for rank in range(self.ranks)]
            return torch.cat(every, dim)

        return gather


class _AllRanksBlock(StandIn):
    """Stand-in for a layer's attention or MLP that runs every rank's slice in one process, one
    after another, and returns the sum of their outputs."""

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
        # Each pass, one more module in a row reads the inputs that the other ranks gave it.
        for _ in self._block.wide:
            for part in self._parts:
                part(*arguments, **keywords)
        outs = [part(*arguments, **keywords) for part in self._parts]
        total = first(outs[0])
        for out in outs[1:]:
            total = total + first(out)
        bias = self._module.get_submodule(self._block.last)._parameters.get("bias")
        return with_first(outs[0], total if bias is None else total + bias)


def _sliced(module: nn.Module, name: str, cuts: LayerPlan, rank: int, ranks: int) -> nn.Module:
    """Return a copy of attention or an MLP whose sharded parameters are the slices of one rank."""
    own: dict[str, dict[str, nn.Parameter]] = {"": {}}  # of the block and its children
    for key, cut in cuts.cuts.items():
        if not key.startswith(f"{name}."):
            continue
        child, _, leaf = key.removeprefix(f"{name}.").rpartition(".")
        whole = module.get_submodule(child)._parameters[leaf]
        assert whole is not None
        part = nn.Parameter(cut.slice(whole.detach(), rank, ranks), False)
        own.setdefault(child, {})[leaf] = part
    slices = own.pop("")
    children = {
        child: shell_of(module.get_submodule(child), parameters=parts, own_forward=True)
        for child, parts in own.items()
    }
    return shell_of(module, children, parameters=slices, own_forward=True)


def _dtype(layer: nn.Module) -> torch.dtype:
    return next(p.dtype for p in layer.parameters() if p.is_floating_point())


def _randomise(layer: nn.Module) -> None:
    """Draw random weights, in place: zeros and ones would hide terms that are added twice."""
    for number, p in enumerate(layer.parameters()):
        generator = torch.Generator(p.device).manual_seed(number)
        noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
        p.copy_(noise * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + 0.2 * noise)
