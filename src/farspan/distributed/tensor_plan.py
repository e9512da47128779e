"""Sharding of decoder layers over the ranks of `tensor`, from the model's own plan.

transformers names, family by family, the linear modules that are sharded by outputs ("colwise") and
by inputs ("rowwise"): `base_model_tp_plan`. A block, a layer's attention or MLP, begins with the
former and ends with one of the latter, so that its output is the sum over ranks of the outputs for
each rank's own heads or features (Megatron-LM 3). Nothing outside the layers is sharded: every rank
has the whole embedding and head, whose tokens the ranks share anyway.

Where transformers gathers the activations between the two ("colwise_gather_output",
"rowwise_split_input"), they stay sharded here: outputs of several kinds in one weight are cut kind
by kind, and a norm over the features of all ranks gathers its input. `tensor.check_layers` verifies
that the parts of a block add up to the block.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from farspan.program.layout import part
from farspan.spec import UnsupportedError

COLWISE = ("colwise", "colwise_gather_output")
ROWWISE = ("rowwise", "rowwise_split_input")
REPLICATED = ("replicated_with_grad_allreduce",)
INSTEAD = "use ulysses instead of tensor"


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """Sharding of a parameter along a dimension, in equal slices of each of its parts (Q, K, V)."""

    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    parts: tuple[int, ...]  # their sum is shape[dim]

    def slice(self, whole: Tensor, index: int, ranks: int) -> Tensor:
        """Return a copy of what rank `index` holds: its slice of each part (such as Q, K, V)."""
        assert tuple(whole.shape) == self.shape, (whole.shape, self.shape)
        own = []
        for piece in whole.split(self.parts, self.dim):
            start, stop = part((0, piece.shape[self.dim]), index, ranks)
            own.append(piece.narrow(self.dim, start, stop - start))
        return torch.cat(own, self.dim).contiguous()

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter, joined from the slices of all ranks."""
        sizes = [size // len(slices) for size in self.parts]
        pieces = [own.split(sizes, self.dim) for own in slices]
        return torch.cat(
            [torch.cat(kind, self.dim) for kind in zip(*pieces, strict=True)], self.dim
        )


@dataclass(frozen=True, slots=True)
class WideModule:
    """A module in attention or MLP that needs all ranks' features, such as a norm over heads."""

    name: str
    shape: tuple[int, ...]  # trailing dimensions that it reads; the first is cut


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A child of a decoder layer, attention or MLP, that is sharded. It reads all ranks' tokens,
    and its outputs are summed over ranks."""

    name: str
    last: str  # name of its rowwise module
    attends: bool
    wide: tuple[WideModule, ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    blocks: tuple[TensorBlock, ...]
    cuts: dict[str, ParameterCut]  # by parameter name in the layer


@dataclass(frozen=True)
class TensorPlan:
    """Sharding of a model's decoder layers over `ranks` ranks."""

    ranks: int
    prefix: str  # name of the list of layers in the model
    layers: tuple[LayerPlan, ...]

    @cached_property
    def cuts(self) -> dict[str, ParameterCut]:
        """Sharding of each sharded parameter, by its name in the model. A layer's other parameters
        are whole, but their gradients must be summed over the ranks of `tensor`: norms see only a
        rank's own tokens, norms in attention its own heads, and rowwise biases are added to its own
        tokens."""
        return {
            f"{self.prefix}.{index}.{name}": cut
            for index, layer in enumerate(self.layers)
            for name, cut in layer.cuts.items()
        }


def plan_tensor(model: nn.Module, layers: nn.ModuleList, ranks: int) -> TensorPlan:
    """Plan the sharding of a causal LM over ranks, from transformers' own plan for the model.

    Raises UnsupportedError for a model without a plan, and for styles inside a layer that farspan
    cannot shard exactly.
    """
    prefix, decoder = _owner(model, layers)
    config: Any = decoder.config
    styles = _styles(decoder, prefix.rpartition(".")[2])
    if not styles:
        raise UnsupportedError(
            f"tensor: {type(model).__name__} has no tensor parallel plan of its own "
            f"(base_model_tp_plan); {INSTEAD}"
        )
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if gcd(heads, kv_heads, ranks) != ranks:
        raise UnsupportedError(
            f"tensor: {ranks} devices do not divide {heads} query heads and {kv_heads} key-value "
            f"heads evenly; use tensor: {gcd(heads, kv_heads, ranks)} and ulysses or shards"
        )
    reader = _PlanReader(styles, ranks, heads, kv_heads)
    plans = tuple(reader.layer(f"{prefix}.{i}", layer) for i, layer in enumerate(layers))
    plan = TensorPlan(ranks, prefix, plans)
    _refuse_tied(model, plan)
    return plan


@dataclass(frozen=True, slots=True)
class _PlanReader:
    """Conversion of transformers' plan for a model, layer by layer."""

    styles: dict[str, str]  # by name in the layer, with * for numbers
    ranks: int
    heads: int
    kv_heads: int

    def layer(self, where: str, layer: nn.Module) -> LayerPlan:
        by_block: dict[str, dict[str, str]] = {}
        for name, style in self._named(layer):
            block, _, leaf = name.partition(".")
            what = f"{where}.{name} ({style})"
            if style not in (*COLWISE, *ROWWISE, *REPLICATED):
                raise UnsupportedError(
                    f"tensor: {what} has a style that farspan cannot shard; {INSTEAD}"
                )
            if not leaf or "." in leaf:
                raise UnsupportedError(
                    f"tensor: {what} is not a direct child of attention or an MLP; {INSTEAD}"
                )
            by_block.setdefault(block, {})[leaf] = style
        cuts: dict[str, ParameterCut] = {}
        blocks = []
        for name, styles in by_block.items():
            blocks.append(self._block(f"{where}.{name}", name, layer, styles, cuts))
        _refuse_whole_attention(where, layer, blocks)
        return LayerPlan(tuple(blocks), cuts)

    def _named(self, layer: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield names in a layer that transformers' plan lists, with styles such as "colwise"."""
        names = [name for name, _ in layer.named_modules()]
        names += [name for name, _ in layer.named_parameters()]
        for name in names:
            style = self.styles.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))
            if style is not None:
                yield name, style

    def _block(
        self,
        where: str,
        name: str,
        layer: nn.Module,
        styles: dict[str, str],
        cuts: dict[str, ParameterCut],
    ) -> TensorBlock:
        module = layer.get_submodule(name)
        last = [leaf for leaf, style in styles.items() if style in ROWWISE]
        if len(last) != 1:
            raise UnsupportedError(
                f"tensor: {where} has {len(last)} rowwise modules in its plan, expected one whose "
                f"outputs are summed; {INSTEAD}"
            )
        weight = _linear(where, last[0], styles[last[0]], module).weight
        attends = hasattr(module, "is_causal")
        features, widths = weight.shape[1], set()
        block_cuts = {f"{last[0]}.weight": ParameterCut(tuple(weight.shape), 1, (features,))}
        for leaf, style in styles.items():
            if style not in COLWISE:
                continue
            parameters = _column(where, leaf, style, module)
            first = next(iter(parameters.values()))
            parts = self._parts(style, first.shape[0], features, attends)
            widths.add(first.shape[0])
            block_cuts |= {
                key: ParameterCut(tuple(p.shape), 0, parts) for key, p in parameters.items()
            }
        for leaf, cut in block_cuts.items():
            self._refuse_uneven(f"{where}.{leaf}", cut)
            cuts[f"{name}.{leaf}"] = cut
        return TensorBlock(name, last[0], attends, tuple(_wide(module, widths, styles)))

    def _parts(self, style: str, outputs: int, features: int, attends: bool) -> tuple[int, ...]:
        """Return how many of a weight's outputs belong to each of its parts, such as Q, K, V."""
        if style == "colwise":
            return (outputs,)
        of_keys = features // self.heads * self.kv_heads
        if attends and outputs == features + 2 * of_keys:
            return features, of_keys, of_keys
        if not attends and outputs == 2 * features:
            return features, features
        return (outputs,)

    def _refuse_uneven(self, what: str, cut: ParameterCut) -> None:
        for size in cut.parts:
            if size % self.ranks:
                raise UnsupportedError(
                    f"tensor: {self.ranks} devices do not divide the {size} features of {what} "
                    f"evenly; use tensor: {gcd(size, self.ranks)}, or ulysses"
                )


def _owner(model: nn.Module, layers: nn.ModuleList) -> tuple[str, nn.Module]:
    """Return the name of the model's list of decoder layers, and the module that has the list."""
    for name, module in model.named_modules():
        if module is layers:
            return name, model.get_submodule(name.rpartition(".")[0])
    raise AssertionError("the layers are not the model's")


def _styles(decoder: nn.Module, layers: str) -> dict[str, str]:
    # A decoder's own plan also has entries set on the instance.
    config: Any = decoder.config
    plans = (getattr(config, "base_model_tp_plan", None), getattr(decoder, "_tp_plan", None))
    start = f"{layers}.*."
    return {
        name.removeprefix(start): style
        for plan in plans
        for name, style in (plan or {}).items()
        if name.startswith(start)
    }


def _linear(where: str, leaf: str, style: str, block: nn.Module) -> nn.Linear:
    module = getattr(block, leaf)
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if not plain or "forward" in vars(module) or not module.weight.is_floating_point():
        raise UnsupportedError(
            f"tensor: {where}.{leaf} ({style}) is a {type(module).__name__}, expected a plain "
            f"torch.nn.Linear; {INSTEAD}"
        )
    return module


def _column(where: str, leaf: str, style: str, block: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of one "colwise" entry in the plan: those of a linear module, or one
    parameter of the block itself, such as sinks."""
    direct = block._parameters.get(leaf)
    if direct is not None:
        return {leaf: direct}
    named = _linear(where, leaf, style, block).named_parameters()
    return {f"{leaf}.{name}": parameter for name, parameter in named}


def _wide(block: nn.Module, widths: set[int], styles: dict[str, str]) -> Iterator[WideModule]:
    for name, child in block.named_children():
        weight = child._parameters.get("weight")
        cut = styles.get(name) in (*COLWISE, *ROWWISE)
        if weight is not None and not cut and weight.numel() in widths:
            yield WideModule(name, tuple(weight.shape))


def _refuse_whole_attention(where: str, layer: nn.Module, blocks: Sequence[TensorBlock]) -> None:
    """Raise UnsupportedError if attention is not sharded: it would see only this rank's tokens."""
    cut = {block.name for block in blocks if block.attends}
    for name, child in layer.named_children():
        if name not in cut and any(hasattr(module, "is_causal") for module in child.modules()):
            raise UnsupportedError(
                f"tensor: {where}.{name} attends and has no plan of its own; {INSTEAD}"
            )
    if not cut:
        raise UnsupportedError(f"tensor: {where} has no attention in its plan; {INSTEAD}")


def _refuse_tied(model: nn.Module, plan: TensorPlan) -> None:
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if other != name and (name in plan.cuts or other in plan.cuts):
            raise UnsupportedError(f"tensor: {other} and {name} are tied; untie them, or {INSTEAD}")
