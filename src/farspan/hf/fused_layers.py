"""Run norms, gated MLPs and rotary embeddings of decoder layers on farspan's own kernels.

A module is recognised by its results, never by its name: small stand-ins replace its weights, and
it is fused if its own code then gives, bit for bit, the result of the formula in
`kernels.reference`. An unrecognised module runs unchanged.

Kept cells store neither the outputs of norms nor act(gate) * up, but compute them again
(`activations.remade`), whether the kernels or PyTorch's operators run. With operators, the
tensors that these save within norms and gates are computed again, too.

The model is not changed: a layer runs in a shell, a shallow copy whose modules share the model's
parameters and have another forward (see `stages`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import permutations
from types import CellType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from farspan.activations import is_recording, remade, rerun
from farspan.hf.indexer import is_indexer
from farspan.hf.stages import CausalLMStages
from farspan.hf.swap import shell_of
from farspan.hf.tiled_mlp import Tokenwise, tokenwise
from farspan.kernels import reference
from farspan.kernels.launch import fused_for
from farspan.kernels.operations import WIDEST, Act, Norm, gated, normed, rms_norm, rotated, swiglu
from farspan.spec import Kernels, UnsupportedError

Forward = Callable[..., Any]
Rule = Callable[[nn.Module], Forward | None]  # a shell's forward; None: no change

ROTATION = "apply_rotary_pos_emb"  # the families' usual name for it
TOKENS, WIDTH, INNER, HEADS = 37, 8, 12, 2  # sizes of the stand-ins
SCALES = (1.0, 30.0, 1e4)  # of stand-in values: families clamp at 7 to 20
GRADIENTS = 8  # roundings allowed between gradients that are summed in two orders


@dataclass(slots=True)
class Linears:
    """Calls of a gated MLP's linear modules; `engine.gradients` has a faster subclass for steps."""

    remakes: bool = field(default=True, kw_only=True)  # kept cells compute act(gate) * up again

    def pair(self, gate: nn.Module, up: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the gate and up modules on the same input."""
        return gate(x), up(x)

    def last(self, down: nn.Module, gate: Tensor, up: Tensor, act: Act) -> Any:
        """Run the down module on act(gate) * up, and return the MLP's output."""
        out = gated(gate, up, act)
        return down(remade(out, partial(swiglu, act=act), gate, up) if self.remakes else out)


PLAIN = Linears()


def in_shells(module: nn.Module, rules: Iterable[Rule]) -> nn.Module:
    """Return a shell (shallow copy) of a module, in which each submodule runs the forward given by
    the first rule that matches it. Returns the module itself if no rule matches anything in it."""
    rules = tuple(rules)
    # A parametrized module has its own class, which is not copied. A forward set on the module
    # itself calls its own children, as does the one that a step sets on an indexer.
    if is_parametrized(module) or "forward" in module.__dict__ or is_indexer(module):
        return module
    own = {name: child for name, child in module._modules.items() if child is not None}
    shells = {name: in_shells(child, rules) for name, child in own.items()}
    changed = {name: shell for name, shell in shells.items() if shell is not own[name]}
    own_way = module._compiled_call_impl is not None
    found = (None if own_way else rule(module) for rule in rules)
    forward = next((f for f in found if f is not None), None)
    if forward is None and not changed:
        return module
    return shell_of(module, changed, forward=forward)


def _passes(check: Callable[[], bool]) -> bool:
    """Return the result of `check`, which tries out a module; False if the check raises."""
    try:
        return check()
    except Exception:
        return False


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _same(actual: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor) -> bool:
    """Return whether a module's own code and a formula give the same results, for small and large
    inputs (where clamps begin), with and without autograd. Values must agree bit for bit in fp32
    and in bf16, whose roundings show the order of operations; gradients, which detached tensors
    would change, only up to rounding."""
    for dtype in (torch.bfloat16, torch.float32):
        for scale in SCALES:
            xs = [(scale * x).to(dtype) for x in inputs]
            with torch.no_grad():
                expected = formula(*xs)
                if not torch.equal(actual(*xs), expected):
                    return False
            outs = []
            for function in (actual, formula):
                leaves = [x.clone().requires_grad_() for x in xs]
                with torch.enable_grad():
                    out = function(*leaves)
                towards = _random(*out.shape, seed=12, dtype=dtype)
                outs.append((out.detach(), *torch.autograd.grad(out, leaves, towards)))
            if not torch.equal(outs[0][0], expected):
                return False
            limit = GRADIENTS * torch.finfo(dtype).eps
            if not all(_near(a, b, limit) for a, b in zip(*outs, strict=True)):
                return False
    return True


def _near(actual: Tensor, expected: Tensor, limit: float) -> bool:
    error = float((actual.double() - expected.double()).norm())
    return error <= limit * float(expected.double().norm())


def _or_own(run: Callable[[nn.Module, Tensor], Any], takes: Callable[[Any], bool]) -> Forward:
    """Return a forward that calls `run` with an input that it takes, else the module's own code."""

    def forward(shell: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if len(arguments) == 1 and not keywords and takes(*arguments):
            return run(shell, *arguments)
        return type(shell).forward(shell, *arguments, **keywords)

    return forward


def _takes(*tensors: Any) -> bool:
    """Return whether the kernels support these inputs."""
    return all(isinstance(x, Tensor) and fused_for(x.device, x.dtype) for x in tensors)


# -- norms -------------------------------------------------------------------------------------


def norm_forward(module: nn.Module, remakes: bool = True) -> Forward | None:
    """Return the fused forward of an RMS norm whose only parameter is one weight vector. With
    `remakes`, kept cells compute its output again."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if set(parameters) != {"weight"} or weight is None or weight.ndim != 1:
        return None
    if module._modules or module._buffers:
        return None
    for name in ("variance_epsilon", "eps", "epsilon"):
        eps = getattr(module, name, None)
        if isinstance(eps, float) and weight.shape[0] <= WIDEST:
            break
    else:
        return None
    for norm in (Norm(eps), Norm(eps, cast=False), Norm(eps, offset=1.0, cast=False)):
        if _passes(partial(_norms, module, weight.shape[0], norm)):
            return _or_own(partial(_normed, norm, remakes), _takes)
    return None


def _normed(norm: Norm, remakes: bool, shell: nn.Module, x: Tensor) -> Tensor:
    weight = cast(Tensor, shell.weight)
    out = normed(x, weight, norm)
    return remade(out, lambda x, w: rms_norm(x, w, norm)[0], x, weight) if remakes else out


def _norms(module: nn.Module, width: int, norm: Norm) -> bool:
    weight = _random(width, seed=1)
    # Vectors alternate between lengths 1, so short that eps matters, and long.
    lengths = torch.tensor([1.0, norm.eps**0.5, 30.0]).repeat(1 + TOKENS // 3)[:TOKENS, None]

    def own(x: Tensor) -> Tensor:
        in_dtype = {"weight": nn.Parameter(weight.to(x.dtype), False)}
        out: Tensor = shell_of(module, parameters=in_dtype)(x)
        return out

    def formula(x: Tensor) -> Tensor:
        return reference.rms_norm(x, weight.to(x.dtype), norm.eps, norm.offset, norm.cast)

    return _same(own, formula, _random(1, TOKENS, width, seed=2) * lengths)


# -- gated MLPs --------------------------------------------------------------------------------


def gate_forward(module: nn.Module, linears: Linears = PLAIN) -> Forward | None:
    """Return the fused forward of a gated MLP: an activation and three linear modules, or two if
    gate and up are one module. None if the module is not a gated MLP."""
    found = _gate_of(module)
    return None if found is None else _or_own(partial(_gated, found, linears), _takes)


class _Gate(NamedTuple):
    """Names of the modules of a gated MLP: gate and up or both in one, down, the activation."""

    ups: tuple[str, ...]
    down: str
    bare: str
    act: Act


def _gate_of(module: nn.Module) -> _Gate | None:
    if list(module.named_parameters(recurse=False)) or module._buffers:
        return None
    bare = [name for name, child in module.named_children() if not list(child.parameters())]
    linear = [name for name, child in module.named_children() if list(child.parameters())]
    if len(bare) != 1 or len(linear) not in (2, 3):
        return None
    act = _act_of(module.get_submodule(bare[0]))
    if act is None:
        return None
    for names in permutations(linear):
        if _passes(partial(_gates, module, names, act)):
            return _Gate(names[:-1], names[-1], bare[0], act)
    return None


def _act_of(module: nn.Module) -> Act | None:
    x = _random(TOKENS, INNER, seed=3)
    for act in Act:
        formula = partial(lambda act, x: reference.gated(x, torch.ones_like(x), act), act)
        if _passes(partial(_same, module, formula, x)):
            return act
    return None


def _gates(module: nn.Module, names: tuple[str, ...], act: Act) -> bool:
    """Return whether the named modules are an MLP's gate, up and down, or gate-up and down."""
    *ups, down = names
    outer = INNER if len(ups) == 2 else 2 * INNER
    matrices = {name: _random(outer, WIDTH, seed=4 + i) for i, name in enumerate(ups)}
    matrices[down] = _random(WIDTH, INNER, seed=6)
    shell = shell_of(module, {name: _Times(matrix) for name, matrix in matrices.items()})

    def formula(x: Tensor) -> Tensor:
        halves = [x @ matrices[name].T.to(x.dtype) for name in ups]
        gate, up = halves if len(halves) == 2 else halves[0].chunk(2, -1)
        return reference.gated(gate, up, act) @ matrices[down].T.to(x.dtype)

    return _same(shell, formula, _random(1, TOKENS, WIDTH, seed=7))


class _Times(nn.Module):
    """Stand-in for a linear module that multiplies by a fixed matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T.to(x.dtype)


def _gated(of: _Gate, linears: Linears, shell: nn.Module, x: Tensor) -> Any:
    ups = [shell.get_submodule(name) for name in of.ups]
    gate, up = linears.pair(ups[0], ups[1], x) if len(ups) == 2 else ups[0](x).chunk(2, -1)
    return linears.last(shell.get_submodule(of.down), gate, up, of.act)


# -- rotary embeddings ---------------------------------------------------------------------------


def _rotating(forward: Any) -> Forward | None:
    """Return a copy of attention's forward that calls farspan's rotary embedding instead of
    `apply_rotary_pos_emb` of the model's file, also inside the decorators of transformers since
    5.24; None if the forward does not rotate as usual."""
    if not isinstance(forward, FunctionType):
        return None
    names, cells = forward.__globals__, forward.__closure__ or ()
    inside = getattr(forward, "__wrapped__", None)
    if inside is not None:
        made = _rotating(inside)
        if made is None or not any(cell.cell_contents is inside for cell in cells):
            return None
        cells = tuple(CellType(made) if c.cell_contents is inside else c for c in cells)
    else:
        plain = names.get(ROTATION) if ROTATION in forward.__code__.co_names else None
        if plain is None or not _is_rotation(plain):
            return None
        names = {**names, ROTATION: partial(_rotate, plain)}
    found = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, cells)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


@cache
def _is_rotation(plain: Forward) -> bool:
    return _passes(partial(_rotates, plain))


def _rotates(plain: Forward) -> bool:
    q, k = (_random(1, heads, TOKENS, WIDTH, seed=8 + heads) for heads in (HEADS, 1))
    angles = _random(1, TOKENS, WIDTH // 2, seed=11).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def own(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(plain(q, k, cos.to(q.dtype), sin.to(q.dtype)), 1)

    def formula(q: Tensor, k: Tensor) -> Tensor:
        tables = cos.to(q.dtype), sin.to(q.dtype)
        return torch.cat([reference.rotated(x, *tables) for x in (q, k)], 1)

    return _same(own, formula, q, k)


def _rotate(
    plain: Forward, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any
) -> Any:
    """Rotate q and k by the kernel if it supports them, else by the model family's own function."""
    common = not more and not named and cos.ndim == 3 and cos.shape[-1] == q.shape[-1]
    if common and q.stride(-1) == k.stride(-1) == 1 and _takes(q, k, cos):
        return rotated(q, k, cos, sin)
    return plain(q, k, cos, sin, *more, **named)


# -- PyTorch's operators, run again -------------------------------------------------------------


def _in_kept_cell(_: Any) -> bool:
    return is_recording()


def _run_again(shell: nn.Module, x: Tensor) -> Tensor:
    return rerun(partial(type(shell).forward, shell), x)


def norm_again(module: nn.Module) -> Forward | None:
    """Return the forward of a norm by PyTorch's operators that kept cells run again; None for other
    modules. A norm's parameters are vectors, and two calls give the same bits."""
    parameters = dict(module.named_parameters(recurse=False))
    if module._modules or module._buffers or {p.ndim for p in parameters.values()} != {1}:
        return None
    if not _passes(partial(_repeats, module, parameters)):
        return None
    return _or_own(_run_again, _in_kept_cell)


def _repeats(module: nn.Module, parameters: dict[str, nn.Parameter]) -> bool:
    stand_ins = {
        name: nn.Parameter(_random(len(p), seed=1), False) for name, p in parameters.items()
    }
    shell = shell_of(module, parameters=stand_ins)
    x = _random(1, TOKENS, len(next(iter(parameters.values()))), seed=2)
    with torch.no_grad():
        first, second = shell(x), shell(x)
    return first.shape == x.shape and torch.equal(first, second)


def gate_again(module: nn.Module) -> Forward | None:
    """Return the forward of a gated MLP by PyTorch's operators of which kept cells run act(gate) *
    up again; None if the module is not a gated MLP."""
    found = _gate_of(module)
    return None if found is None else _or_own(partial(_gated_again, found), _in_kept_cell)


def _gated_again(of: _Gate, shell: nn.Module, x: Tensor) -> Any:
    halves = [shell.get_submodule(name)(x) for name in of.ups]
    gate, up = halves if len(halves) == 2 else halves[0].chunk(2, -1)
    act = shell.get_submodule(of.bare)
    return shell.get_submodule(of.down)(rerun(lambda gate, up: act(gate) * up, gate, up))


def rules(
    linears: Linears = PLAIN, *, fused: bool = True, remakes: bool = True
) -> tuple[Rule, ...]:
    """Return the rules by which modules get other forwards: on the kernels if `fused`; with
    `remakes`, such that kept cells store neither norms' outputs nor act(gate) * up."""
    found: tuple[Rule, ...] = ()
    if fused:
        norms = partial(norm_forward, remakes=remakes)
        gates = partial(gate_forward, linears=linears)
        found = norms, gates, lambda module: _rotating(type(module).forward)
    return (*found, norm_again, gate_again) if remakes else found


def fuse(
    stages: CausalLMStages,
    kernels: Kernels,
    device: torch.device,
    *first: Rule,
    linears: Linears | None = None,
) -> None:
    """Make the stages run modules on farspan's kernels for `device`, where cells run, if `kernels`
    enables these, and keep less in kept cells. Rules in `first` are tried before the others."""
    found = *first, *_rules_for(stages, kernels, device, linears or Linears())
    if found:
        stages.run_in(partial(in_shells, rules=found))


def fuse_layers(
    stages: CausalLMStages, kernels: Kernels, device: torch.device, *first: Rule, linears: Linears
) -> None:
    """Make layers run as by `fuse`, with rules in `first` that modules outside them do not get."""
    found = *first, *_rules_for(stages, kernels, device, linears)
    stages.run_layers_in(partial(in_shells, rules=found))


def _rules_for(
    stages: CausalLMStages, kernels: Kernels, device: torch.device, linears: Linears
) -> tuple[Rule, ...]:
    fused = kernels.fused and fused_for(device, stages.dtype)
    linears.remakes = kernels.remake
    return rules(linears, fused=fused, remakes=kernels.remake)


def spared_layers(stages: CausalLMStages) -> frozenset[int]:
    """Return the layers that may skip their MLP's last product while nothing reads their output:
    those with one gated MLP on whose output no gradient depends (`tokenwise` checks this)."""
    try:
        children = tokenwise(stages.in_place())
    except (UnsupportedError, RuntimeError):  # a computed weight cannot be copied
        return frozenset()
    return frozenset(i for i, layer in enumerate(stages.layers) if _spares(layer, children[i]))


def _spares(layer: nn.Module, children: tuple[Tokenwise, ...]) -> bool:
    gates = [name for name, module in layer.named_modules() if gate_forward(module) is not None]
    return len(gates) == 1 and any(c.name == gates[0] and not c.needed for c in children)
