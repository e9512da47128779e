"""Published systems as schedules, each of which can be run by its name."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from farspan.formatting import did_you_mean
from farspan.spec import DEVICE, HOST, Schedule, Tier, UnsupportedError

AUTO = "auto"  # the planner chooses the best strategy
GROUPED = "grouped"  # a search takes it as the whole space of schedules


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named schedule, computed from a model's number of layers and a sequence length."""

    name: str
    source: str  # its origin
    schedule: Callable[[int, int], Schedule]  # (layers, tokens)


def _kept(tier: Tier, _: int, tokens: int) -> Schedule:
    return Schedule(
        chunk=tokens,
        groups=1,
        boundary_inputs=tier,
        kv_kept=True,
        kv_home=tier,
        activations=tier,
        activation_save_fraction=1.0,
        attention=tier,
        attention_save_fraction=1.0,
    )


def _recompute(tier: Tier, _: int, tokens: int) -> Schedule:
    return Schedule(chunk=tokens, groups=1, boundary_inputs=tier)


def _memo(_: int, tokens: int) -> Schedule:
    # alpha depends on the machine (the linear program of MEMO 4.1); half is a start.
    return Schedule(
        chunk=max(1, -(-tokens // 16)),
        groups=1,
        boundary_inputs=Tier.HOST,
        attention=Tier.HOST,
        attention_save_fraction=1.0,
        activations=Tier.HOST,
        activation_save_fraction=0.5,
    )


def _fpdt(_: int, tokens: int) -> Schedule:
    # 64K is FPDT's chunk; a shorter sequence is still cut in four so that copies and cells overlap.
    chunk = min(65536, max(1, -(-tokens // 4)))
    return Schedule(
        chunk=chunk, groups=1, boundary_inputs=Tier.HOST, kv=Tier.HOST, kv_block=min(chunk, 16384)
    )


def _oomb(layers: int, tokens: int) -> Schedule:
    chunk = min(4096, max(1, -(-tokens // 4)))
    return Schedule(chunk=chunk, groups=layers, kv=Tier.HOST, layer_checkpoint=True, kv_block=16384)


def _grouped(layers: int, tokens: int) -> Schedule:
    # g near sqrt(L) is where g(kappa + delta) meets (L / g)a for the GQA models of facts 2.2.
    size = max(1, round(layers**0.5))
    return Schedule(
        chunk=min(16384, max(1, -(-tokens // 4))),
        groups=size,
        boundary_inputs=Tier.HOST,
        attention=Tier.HOST,
        attention_save_fraction=1.0,
    )


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("plain", "autograd, every activation kept on the device", partial(_kept, DEVICE)),
        Strategy("recompute", "activation checkpointing", partial(_recompute, DEVICE)),
        Strategy(
            "offload",
            "activation checkpointing with layer inputs on host",
            partial(_recompute, HOST),
        ),
        Strategy("swap", "every activation kept on host", partial(_kept, HOST)),
        Strategy("memo", "MEMO: token-wise recompute and swap", _memo),
        Strategy("fpdt", "FPDT: a layer's K, V streamed from host in chunks", _fpdt),
        Strategy("oomb", "OOMB: chunk-recurrent through the whole model", _oomb),
        Strategy(GROUPED, "farspan: groups of layers, between FPDT and OOMB", _grouped),
    )
}


def strategy(name: str, layers: int, tokens: int) -> Schedule:
    """Return the schedule of a strategy.

    Args:
        name: One of `STRATEGIES`, such as fpdt.
        layers: Number of the model's decoder layers.
        tokens: Number of tokens in a sequence.

    Returns:
        The strategy's own defaults; published strategies exchange all heads at once.

    Raises:
        UnsupportedError: The name is unknown.
    """
    check_name(name, STRATEGIES)
    schedule = STRATEGIES[name].schedule(layers, tokens)
    return schedule if name == GROUPED else replace(schedule, alltoall_splits=1)


def check_name(name: str, known: Collection[str] = (AUTO, *STRATEGIES)) -> None:
    """Raise UnsupportedError for an unknown strategy, naming the closest one."""
    if name not in known:
        raise UnsupportedError(
            f"strategy: {name!r} is not known{did_you_mean(name, known)}; expected one of "
            f"{', '.join(known)}"
        )
