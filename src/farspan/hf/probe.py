"""Prove that a model can run in chunks by running it on a handful of tokens.

Attention is computed densely. The model runs as a whole, then stage by stage, then every kind of
layer alone. If two results differ, something mixes tokens outside of attention, or attention
bypasses the interface, and the model is refused. Stage by stage the operations are the same, and so
is the rounding.

Each kind of layer is checked in two ways for mixing of tokens by anything but attention and the
states that it passes on. With attention replaced by constants, no gradient may go from one token to
another, however small, so that a scan shows whose fresh weights forget all but 1e-7 of a token. And
the layer must give the same results in chunks. A layer with attention must in its outputs, in
float32 or wider, where mixing shows far above rounding; a recurrent layer also in its gradients,
which show whether it continues from the state it was given.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from farspan.attention.backends import reference
from farspan.hf.attention_interface import (
    answering,
    attended,
    eager_experts,
    routed,
    watching_masks,
)
from farspan.hf.compiled import UncompiledMode, uncompiled
from farspan.hf.indexer import IndexerCall
from farspan.hf.quantized import copied
from farspan.hf.recurrent import RecurrentStates, mixers, run_piece, state_spec, takes_two
from farspan.hf.stages import CausalLMStages, LayerCall, run_layer
from farspan.spec import Indexer, LayerSpec, UnsupportedError

# Keywords of an attention call that do not change the result, or that farspan supports.
KNOWN = {
    "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
    "output_attentions", "output_router_logits", "output_hidden_states", "cache_position",
    "past_key_values", "logits_to_keep", "chunked", "indices",
}  # fmt: skip


TOKENS, CUT = 8, 5  # tokens of the probe, cut off centre so that chunks differ
PIECES = (0, 3, 7, 8)  # cuts for a recurrent layer
# Relative error allowed for such pieces. Their own fp32 arithmetic, in another order, stays below
# 1e-5.
LOST = 1e-3
# Relative errors allowed for chunks of a layer in float32 and wider: products of another shape
# round apart by 1e-7, and a float64 model may have routers and norms in float32.
MIXING = {torch.float32: 1e-4, torch.float64: 1e-6}


# Relative error of a loss that is computed twice from the same logits in float32.
_LOSS = 1e-5

UNATTENDING = LayerSpec(0, 0, 0, 0, window=1)  # a layer without attention


# Next to the ends of torch.rand's range: a probability lies between them, unless it is 0 or 1.
# (rand returns 0 itself once in 2**24 draws, at which PEFT drops a module even at a dropout of 0.)
_ENDS = 2.0**-24, 1 - 2.0**-24
_COMPARISONS = (torch.ops.aten.gt, torch.ops.aten.ge, torch.ops.aten.lt, torch.ops.aten.le)


class _NoChance(UncompiledMode):
    """Mode that refuses operations that draw random numbers, since a recomputed cell would draw
    other numbers. A single uniform number may be drawn if it is only compared with a value outside
    its range, as PEFT's LoHa and LoKr do at a module dropout of 0, and OPT, before transformers
    5.23, at a LayerDrop of 0."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        used = [i for i, x in enumerate(args) if any(x is drawn for drawn in self._drawn)]
        same = func is torch.ops.aten.detach.default
        if used and not same:
            return self._compared(func, args, used[0], kwargs)
        out = func(*args, **kwargs)
        if used or (func is torch.ops.aten.rand.default and out.numel() == 1):
            self._drawn.append(out)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            raise self._refusal(func)
        return out

    def _compared(self, func: Any, args: tuple[Any, ...], index: int, kwargs: Any) -> Any:
        """Return the result of comparing a drawn number with a value. Raises UnsupportedError if
        the result depends on the number: it is computed for both ends of the number's range."""
        if func.overloadpacket not in _COMPARISONS:
            raise self._refusal(torch.ops.aten.rand.default)
        ends = (torch.full_like(args[index], end) for end in _ENDS)
        low, high = (func(*args[:index], end, *args[index + 1 :], **kwargs) for end in ends)
        if not torch.equal(low, high):
            raise self._refusal(torch.ops.aten.rand.default)
        return low

    def _refusal(self, func: Any) -> UnsupportedError:
        return UnsupportedError(
            f"model: its forward draws random numbers ({func}), which a recomputed cell cannot "
            "repeat; set its dropout and jitter options to 0 (in a run file: model.overrides) or "
            "call model.eval()"
        )


@torch.no_grad()
def probe_layers(stages: CausalLMStages) -> list[LayerSpec]:
    """Return each layer's attention. Raises UnsupportedError if chunks would not be exact."""
    try:
        return _probe(stages)
    except Exception as error:
        if isinstance(error, UnsupportedError):
            _refuse_nonfinite(stages.model)  # with such a weight a model differs from itself
        if error.__cause__ is not None or not isinstance(error, UnsupportedError):
            _refuse_failing(stages)
        raise


def _refuse_failing(stages: CausalLMStages) -> None:
    """Raise UnsupportedError if the model's own forward, without farspan, fails too."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=stages.device)
    try:
        stages.model(input_ids=ids, use_cache=False)
    except Exception as error:
        dtypes: dict[torch.dtype, str] = {}
        for name, parameter in stages.model.named_parameters():
            dtypes.setdefault(parameter.dtype, f"{name} is {parameter.dtype}")
        several = (
            f"; {', '.join(dtypes.values())}: cast all to one dtype" if len(dtypes) > 1 else ""
        )
        raise UnsupportedError(
            f"model: the forward of {type(stages.model).__name__} also fails without farspan "
            f"({type(error).__name__}: {' '.join(str(error).split())}){several}"
        ) from error


def _refuse_nonfinite(model: nn.Module) -> None:
    """Raise UnsupportedError, naming the first weight that is not finite. Buffers, such as masks,
    may hold infinities."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta or not tensor.is_floating_point():
            continue
        weight = isinstance(tensor, nn.Parameter)
        wrong = int((~tensor.isfinite() if weight else tensor.isnan()).sum())
        if wrong:
            raise UnsupportedError(
                f"model: {name} holds NaN or infinity, {wrong} of its {tensor.numel()} numbers: "
                "its file or checkpoint is damaged, or comes from a run that diverged; use "
                "another one"
            )


def _probe(stages: CausalLMStages) -> list[LayerSpec]:
    stages.settle(TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, stages.vocab, (1, TOKENS), generator=generator).to(stages.device)
    if stages.first_position:  # no padding: its id is one less
        ids = ids.masked_fill(ids == stages.first_position - 1, stages.first_position)
    hidden = torch.randn(1, TOKENS, stages.width, generator=generator).to(stages.device)
    if stages.carries and (choice := stages.carries[0].layout.choice):
        hidden[..., -choice:] = 0  # queries of all layers see the first token
    with uncompiled(), _NoChance():
        with watching_masks(stages.model) as windows:
            whole, calls = _run_whole(stages, ids)
        try:
            _refuse_lost_gradients(stages)
            with routed(stages.model):
                seen = _run_staged(stages, ids, whole, calls)
        except Exception as error:
            if isinstance(error, UnsupportedError) or calls:
                raise
            raise UnsupportedError(_attends_elsewhere(stages, 0, 0)) from error
        with routed(stages.model):
            refuse_mixing(stages, hidden, seen)
    # Qwen2-MoE requests a mask of 0 tokens when windows are off, and passes it to no layer.
    unheard = windows - {layer.window for layer in seen} - {0}
    if unheard:
        raise UnsupportedError(
            f"model: {type(stages.model).__name__} limits attention to {sorted(unheard)} tokens "
            "only by its mask (a window or chunked attention), without telling the attention "
            "interface, so farspan cannot apply this limit"
        )
    return seen


@torch.no_grad()
def ask_layers(stages: CausalLMStages) -> list[LayerSpec]:
    """Return each layer's attention, without the checks that depend on the weights' values."""
    with routed(stages.model), uncompiled(), _NoChance():
        calls = stages.calls(1, torch.zeros(1, 1, dtype=torch.long, device=stages.device))
        # A scan of one token takes as long as one of hundreds, so one layer of each kind runs.
        asked = stages.for_each_kind(lambda index: _ask(stages, index, calls[index]))
        seen = [spec for spec, _ in asked]
        _refuse_other_calls(stages, sum(count for _, count in asked), seen)
        refuse_forgetting(stages, seen)
    return seen


def _ask(stages: CausalLMStages, index: int, call: LayerCall) -> tuple[LayerSpec, int]:
    """Run one layer, and return its attention and the number of its attention calls."""
    dense = ProbeAttention(layer=index)
    hidden = torch.ones(1, 1, stages.width, dtype=stages.dtype, device=stages.device)
    try:
        with answering(dense, dense.choose), stages.computing():
            found: object = stages.run_layer(index, hidden, call).dtype
    except RuntimeError as error:  # of autocast, in plain training, too
        if stages.autocast is None:
            raise
        found = error
    if stages.autocast is not None and found != hidden.dtype:
        raise UnsupportedError(
            f"autocast: expected {hidden.dtype} from {type(stages.layers[index]).__name__} itself "
            f"under it, got {found}; load the model in bfloat16"
        )
    spec = _with_states(stages, hidden, index, call, dense.seen.get(index, UNATTENDING))
    mixes = any(isinstance(module, nn.Conv1d) for module in stages.layers[index].modules())
    if mixes and not spec.state:  # chunks would cut it
        raise UnsupportedError(
            f"model: layer {index} of {type(stages.model).__name__} has a convolution over "
            "tokens and hands no state on through the cache"
        )
    return spec, dense.calls


def _with_states(
    stages: CausalLMStages, hidden: Tensor, index: int, call: LayerCall, spec: LayerSpec
) -> LayerSpec:
    """Return a layer's spec with the states that the layer passes on."""
    if spec.attends() and not mixers(stages.layers[index]):
        return spec
    states = RecurrentStates(attends=spec.attends())
    with answering(ProbeAttention(layer=index)):
        run_piece(stages.running[index], hidden, call, states)
    return replace(spec, state=state_spec(states.after))


def _refuse_lost_gradients(stages: CausalLMStages) -> None:
    tied = stages.tied_across()
    if tied is not None:
        raise UnsupportedError(
            f"model: {tied} is shared between a layer and a module outside the layers, but a step "
            "does not add up the gradients of the two; untie it"
        )
    with torch.enable_grad(), routed(stages.model):
        calls = stages.calls(1, torch.arange(2, device=stages.device)[None])
    for call in calls:
        leaves = tree_leaves((call.arguments, call.keywords))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise UnsupportedError(
                f"model: {type(stages.model).__name__} passes its layers a trained tensor besides "
                "the hidden state, whose gradient would be lost; freeze the module that makes it"
            )


def _run_whole(stages: CausalLMStages, ids: Tensor) -> tuple[Tensor, int]:
    """Run the model's own forward, and return its logits (or the input of a head for whole
    sequences) and the number of attention calls."""
    dense = ProbeAttention()
    try:
        with answering(dense):
            if stages.classifies:
                seen: Tensor = stages.decoder(input_ids=ids, use_cache=False).last_hidden_state
                return seen, dense.calls
            out = stages.model(input_ids=ids, use_cache=False)
    except Exception as failure:
        if isinstance(failure, UnsupportedError) or dense.calls:
            raise
        raise UnsupportedError(_attends_elsewhere(stages, 0, 0)) from failure
    name = type(stages.model).__name__
    if not isinstance(getattr(out, "logits", None), Tensor) or out.logits.ndim != 3:
        raise UnsupportedError(
            f"model: {name} returns no logits for each token; expected a causal LM"
        )
    copied = stages.in_copies()
    if copied is None:
        _refuse_other_loss(stages.model, ids)
        return out.logits, dense.calls
    with answering(ProbeAttention()):
        plain: Tensor = copied(input_ids=ids, use_cache=False).logits
    error = distance(plain, out.logits)
    if not error <= torch.finfo(stages.dtype).eps ** 0.5:
        raise UnsupportedError(
            f"model: {name} or its decoder has a replaced forward, such as accelerate's mixed "
            f"precision; its results differ by {error:.1e} from those of the class's own forward, "
            "which a step runs; remove the replacement, and for mixed precision load the model in "
            "the dtype to compute in (dtype=torch.bfloat16)"
        )
    _refuse_other_loss(stages.model, ids)
    return plain, dense.calls


def _refuse_other_loss(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise UnsupportedError if the model's own loss is not the mean cross-entropy of its logits,
    which a step computes. transformers' classes compute that, but a later function or hook may
    not."""
    standard: Any = LOSS_MAPPING["ForCausalLM"]
    what = {
        "a forward that was set on it": "forward" in vars(model),
        "a forward hook": model._forward_hooks,
        "its loss_function": model.loss_function is not standard,
    }
    changed = " or ".join(name for name, there in what.items() if there)
    if not changed:
        return
    advice = "but a step computes only the mean cross-entropy; remove this change"
    name = type(model).__name__
    try:
        with answering(ProbeAttention()):
            out = model(input_ids=ids, labels=ids, use_cache=False)
        own, logits = out.loss, getattr(out, "logits", None)
    except Exception as error:
        raise UnsupportedError(
            f"model: {name}'s own loss fails with {changed} ({type(error).__name__}: {error}), "
            f"{advice}"
        ) from error
    if own is None or not isinstance(logits, Tensor) or logits.ndim != 3:
        return  # a fused head returns no logits, and returns the same loss
    plain = standard(logits, ids, vocab_size=logits.shape[-1])
    if not float((own - plain).abs()) <= _LOSS * float(plain):
        raise UnsupportedError(
            f"model: {name}'s own loss is {float(own):.6g} with {changed}, although the mean "
            f"cross-entropy of its logits is {float(plain):.6g}, {advice}"
        )


def _refuse_other_calls(stages: CausalLMStages, calls: int, seen: list[LayerSpec]) -> None:
    attending = sum(layer.attends() for layer in seen)
    if calls != attending or not any(layer.attends() or layer.state for layer in seen):
        raise UnsupportedError(_attends_elsewhere(stages, calls, attending))


def _attends_elsewhere(stages: CausalLMStages, calls: int, attending: int) -> str:
    name = type(stages.model).__name__
    if not calls:
        return (
            f"model: {name} computes attention, or a recurrence, in code of its own; expected "
            "layers that call transformers' attention interface, or pass on a state in their cache"
        )
    return (
        f"model: {name} called the attention interface {calls} times for "
        f"{len(stages.layers)} layers, {attending} of which attend; every layer must attend "
        "through it exactly once, or hand its state on through the cache"
    )


def _run_staged(
    stages: CausalLMStages, ids: Tensor, whole: Tensor, calls_of_whole: int
) -> list[LayerSpec]:
    dense = ProbeAttention()
    positions = torch.arange(TOKENS, device=ids.device)[None]
    hidden, calls = stages.embed(ids, positions)
    cuts = list(pairwise((0, CUT, TOKENS)))
    parts = [stages.embed(ids[:, a:b], positions[:, a:b])[0] for a, b in cuts]
    _refuse_mixing(stages, "embedded", torch.cat(parts, dim=1), hidden)
    for dense.layer, call in enumerate(calls):
        before = hidden
        with answering(dense, dense.choose):
            hidden = stages.run_layer(dense.layer, before, call)
        spec = dense.seen.get(dense.layer, UNATTENDING)
        dense.seen[dense.layer] = _with_states(stages, before, dense.layer, call, spec)
    seen = [dense.seen[layer] for layer in range(len(stages.layers))]
    _refuse_other_calls(stages, calls_of_whole - sum(stages.twice), seen)
    read = stages.read(hidden)
    if not _is_whole(read, whole):
        _refuse_second_states(stages, ids)
    _refuse_mixing(stages, "run layer by layer", read, whole)
    pieces = [stages.read(hidden[:, a:b]) for a, b in cuts]
    _refuse_mixing(stages, "with its head run in pieces", torch.cat(pieces, dim=1), whole)
    return seen


def _refuse_second_states(stages: CausalLMStages, ids: Tensor) -> None:
    """Raise UnsupportedError if layers pass on more than one hidden state, as Zaya's do."""
    kept: list[Tensor] = []

    def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        leaves = tree_leaves((arguments[1:], keywords))
        if any(leaf is tensor for leaf in leaves for tensor in kept):
            raise UnsupportedError(
                f"model: {type(stages.model).__name__} passes a layer more than the hidden state "
                "of the layer before; expected layers that pass on one hidden state"
            )

    def after(_: nn.Module, __: Any, out: Any) -> None:
        kept.extend(x for x in tree_leaves(out)[1:] if isinstance(x, Tensor))

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in stages.layers]
    handles += [layer.register_forward_hook(after) for layer in stages.layers]
    try:
        with answering(ProbeAttention()):
            stages.decoder(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def _is_whole(actual: Tensor, whole: Tensor) -> bool:
    # Half of the dtype's digits, or of float32's for models that round to it inside.
    limit = max(torch.finfo(whole.dtype).eps ** 0.5, MIXING[torch.float64])
    return distance(actual, whole) <= limit


def _refuse_mixing(stages: CausalLMStages, how: str, actual: Tensor, whole: Tensor) -> None:
    if not _is_whole(actual, whole):
        error = distance(actual, whole)
        raise UnsupportedError(
            f"model: {type(stages.model).__name__} {how} differs by {error:.1e} from the model run "
            "whole; something in the model mixes tokens outside the attention interface"
        )


# -- mixing of tokens within a layer ------------------------------------------------------------


def refuse_mixing(stages: CausalLMStages, hidden: Tensor, seen: list[LayerSpec]) -> None:
    """Raise UnsupportedError if tokens in a layer influence each other by anything but the
    attention or states in `seen`. A layer of each kind runs on `hidden`, [1, TOKENS, hidden]."""
    dtype = stages.dtype if stages.dtype in MIXING else torch.float32
    for index, layer in _of_each_kind(stages, seen):
        if not seen[index].state:
            _refuse_gradients_between_tokens(stages, index, hidden.to(stages.dtype))
        wide = layer if dtype is stages.dtype else copied(layer, stages.device).to(dtype)
        differs = _refuse_other_gradients if seen[index].state else _refuse_other_outputs
        differs(stages, index, wide, hidden.to(dtype))


def refuse_forgetting(stages: CausalLMStages, seen: list[LayerSpec]) -> None:
    """Raise UnsupportedError if a recurrent layer does not continue from the states that it passes
    on. The check does not depend on the weights' values."""
    shape = 1, TOKENS, stages.width
    hidden = torch.zeros(shape, dtype=stages.dtype, device=stages.device)
    for index, layer in _of_each_kind(stages, seen):
        if seen[index].state:
            _with_gradient(stages, index, layer, hidden, list(pairwise(PIECES)))


def _of_each_kind(stages: CausalLMStages, seen: list[LayerSpec]) -> Iterator[tuple[int, nn.Module]]:
    known = set()
    for index, kind in enumerate(zip(stages.kinds(), seen, strict=True)):
        if kind not in known:
            known.add(kind)
            yield index, stages.layers[index]


@dataclass(slots=True)
class _Constant:
    """Stand-in for attention that returns constants and records its inputs."""

    given: list[Tensor] = field(default_factory=list)  # [B, heads, T, head dim] each

    def __call__(
        self, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, __: float, **___: Any
    ) -> Tensor:
        self.given += q, k, v
        batch, heads, tokens, _width = q.shape
        shape = batch, tokens, heads, v.shape[-1]
        numbers = torch.sin(torch.arange(1, 1 + prod(shape), device=q.device))
        return numbers.view(shape).to(q.dtype)


@torch.enable_grad()
def _refuse_gradients_between_tokens(stages: CausalLMStages, index: int, hidden: Tensor) -> None:
    layer, leaf, answer = stages.layers[index], hidden.detach().requires_grad_(), _Constant()
    positions = torch.arange(TOKENS, device=hidden.device)[None]
    call = stages.calls(1, positions)[index]
    with eager_experts(layer), answering(answer):
        out = run_layer(layer, leaf, call)
    made = [out, *(x.transpose(1, 2) for x in answer.given)]  # tokens second
    for here, there in (slice(CUT), slice(CUT, None)), (slice(CUT, None), slice(CUT)):
        total = torch.stack([x[:, here].double().square().sum() for x in made]).sum()
        (found,) = torch.autograd.grad(total, leaf, retain_graph=True)
        if bool(found[:, there].any()):
            raise UnsupportedError(
                f"model: layer {index} of {type(stages.model).__name__} mixes tokens outside the "
                "attention interface (by a convolution or a scan of its own, or a statistic over "
                "tokens), which chunks would cut off"
            )


def _refuse_other_outputs(
    stages: CausalLMStages, index: int, layer: nn.Module, hidden: Tensor
) -> None:
    """Raise UnsupportedError if the layer's outputs change when its tokens are cut in two."""
    cuts, outs = ((0, TOKENS), (0, CUT), (CUT, TOKENS)), []
    remembers = ProbeAttention(layer=0)
    with eager_experts(layer):
        for dense, (start, stop) in zip(
            (ProbeAttention(layer=0), remembers, remembers), cuts, strict=True
        ):
            positions = torch.arange(start, stop, device=hidden.device)[None]
            call = cast_call(stages.calls(1, positions)[index], hidden.dtype)
            with answering(dense, dense.choose):
                outs.append(run_layer(layer, hidden[:, start:stop], call))
    error = distance(torch.cat(outs[1:], dim=1), outs[0])
    if not error <= MIXING[hidden.dtype]:
        raise UnsupportedError(_differs(stages, index, error, "the attention interface"))


def _differs(stages: CausalLMStages, index: int, error: float, where: str) -> str:
    return (
        f"model: layer {index} of {type(stages.model).__name__} run in chunks differs by "
        f"{error:.1e} from the layer run whole; something in the layer mixes tokens outside {where}"
    )


def _refuse_other_gradients(
    stages: CausalLMStages, index: int, layer: nn.Module, hidden: Tensor
) -> None:
    """Raise UnsupportedError if a recurrent layer's outputs or gradients change when its tokens run
    in several parts, the last of one token."""
    shapes = [(0, TOKENS)], list(pairwise(PIECES))
    whole, pieces = (_with_gradient(stages, index, layer, hidden, cuts) for cuts in shapes)
    error = max(distance(x, y) for x, y in zip(pieces, whole, strict=True))
    # A scan that begins anew shows by 3e-7 in outputs of a Jamba with fresh weights, and more in
    # gradients.
    if not error <= LOST:
        raise UnsupportedError(_differs(stages, index, error, "the states it hands on"))


@torch.enable_grad()
def _with_gradient(
    stages: CausalLMStages,
    index: int,
    layer: nn.Module,
    hidden: Tensor,
    cuts: list[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """Run a recurrent layer on token ranges `cuts`; return its output and its input's gradient."""
    leaf, outs, states = hidden.detach().requires_grad_(), [], RecurrentStates()
    given: dict[str, Tensor] = {}
    attends = bool(mixers(layer))
    # Eager experts depend on values: only experts with tokens run.
    experts = nullcontext() if hidden.is_meta else eager_experts(layer)
    with experts, answering(ProbeAttention(layer=index)):
        for start, stop in cuts:
            # New tensors: the piece that left a state may also read it for its output.
            before = {name: x.view_as(x) for name, x in states.after.items()}
            states = RecurrentStates(before, attends=attends)
            given |= {f"{name} at {start}": state for name, state in states.before.items()}
            more = takes_two(stop - start, states.before)
            positions = torch.arange(start, stop + more)
            call = stages.calls(1, positions[None].to(hidden.device))[index]
            piece = leaf[:, start:stop]
            outs.append(run_piece(layer, piece, cast_call(call, hidden.dtype), states))
    out = torch.cat(outs, dim=1)
    towards = torch.sin(torch.arange(out.numel(), device=out.device)).view(out.shape)
    gradient, *others = torch.autograd.grad(
        out, [leaf, *given.values()], towards.to(out.dtype), allow_unused=True
    )
    for name, found in zip(given, others, strict=True):
        if found is None:
            raise UnsupportedError(
                f"model: layer {index} of {type(stages.model).__name__} does not continue from "
                f"the state {name.partition(' ')[0]} that it hands on"
            )
    return out.detach(), gradient


def cast_call(call: LayerCall, dtype: torch.dtype) -> LayerCall:
    """Return a layer's call with its floating-point tensors cast to another dtype."""
    return call.map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 distance, |actual - expected| / |expected|."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


# -- attention during the probe -----------------------------------------------------------------


@dataclass(slots=True)
class ProbeAttention:
    """Dense attention over the keys of the chunks so far, which records each call."""

    layer: int | None = None  # None: count layers by calls, while the whole model runs
    seen: dict[int, LayerSpec] = field(default_factory=dict)
    calls: int = 0
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    indexer: Indexer | None = None  # of the indexer that chose for the call that follows
    past_index: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, call: IndexerCall) -> Tensor:
        """Choose from the tokens of the chunks so far."""
        own, layer = call.keys(), self.calls if self.layer is None else self.layer
        self.indexer = replace(call.sizes, wide=own.dtype != call.hidden.dtype)
        before = self.past_index.get(layer, own[:, :0])
        self.past_index[layer] = torch.cat([before, own], dim=1)
        return call.choose(self.past_index[layer], before.shape[1], TOKENS)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        _check_keywords(module, keywords)
        layer = self.calls if self.layer is None else self.layer
        self.calls += 1
        window = keywords.get("sliding_window")
        sinks = keywords.get("s_aux")
        softcap = keywords.get("softcap")
        sizes = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        chunked = bool(keywords.get("chunked"))
        follows = keywords.get("indices") is not None and self.indexer is None
        config: Any = module.config
        made = Indexer(0, 0, int(config.index_topk)) if follows else self.indexer
        self.seen[layer] = LayerSpec(
            *sizes, window, chunked, sinks is not None, softcap, indexer=made
        )
        self.indexer = None
        if layer in self.past:
            before = self.past[layer]
            k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        self.past[layer] = k, v
        earlier = k.shape[2] - q.shape[2]
        # The reference takes whole sequences: rows before the chunk are computed and dropped.
        q = nn.functional.pad(q, (0, 0, earlier, 0))
        if keywords.get("indices") is not None:
            chosen = nn.functional.pad(keywords["indices"], (0, 0, earlier, 0))
            keywords = {**keywords, "indices": chosen}
        out = attended(reference, q, k, v, scale, keywords)
        return out[:, earlier:]


def _check_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    name = type(module).__name__
    if keywords.get("is_causal") is False:
        raise UnsupportedError(
            f"model: {name} asks for attention to later tokens (is_causal=False); only "
            "causal models run in chunks"
        )
    if (keywords.get("dropout") or 0.0) > 0:
        raise UnsupportedError(
            f"model: {name} applies dropout to attention weights ({keywords['dropout']}), which a "
            "recomputed cell cannot repeat; set its attention dropout to 0"
        )
    window = keywords.get("sliding_window")
    if window is not None and window < 1:
        raise UnsupportedError(
            f"model: {name} lets a token see {window} tokens; set its sliding_window to 1 or more, "
            "or to null for full attention"
        )
    for keyword, value in keywords.items():
        if keyword not in KNOWN and isinstance(value, Tensor | float | int) and value is not False:
            raise UnsupportedError(
                f"model: {name} passes {keyword!r} to attention, which farspan does not support: "
                "ignoring it would not be exact"
            )


# -- float64 throughout -------------------------------------------------------------------------


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm)


class Float64Mode(UncompiledMode):
    """Mode that computes in float64 where a model asks for float32, also in a backward, which
    function modes do not see: so a float64 model can be a reference. Models with float32 parameters
    cannot use the mode, which would change the dtype of their gradients.

    Many families round to float32 on the way: gradients of Gemma's norm weights are then sums over
    tokens in float32, DeepSeek's router is a matrix product in float32, and where a sequence is cut
    changes how a recurrence rounds, by 1e-4 in gradients of decays; uncut, it is as far from
    float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # An empty tensor is the start of a view of memory (`activations`), and has its dtype.
        of_memory = func is torch.ops.aten.empty.memory_format and args == ([0],)
        if kwargs.get("dtype") is torch.float32 and not of_memory:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func.overloadpacket in PRODUCTS:
            first, second, *rest = args
            # A table that was float32 before, such as frequencies, was not requested here.
            if first.dtype is not second.dtype:
                args = first.double(), second.double(), *rest
        return func(*args, **kwargs)
