"""Every way by its name: what runs it, on how many ranks, and which packages it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.peers import alone, together
from benchmarks.peers.bed import DTYPES, MODELS, Case, Found

SINGLE = DTYPES[:1]


@dataclass(frozen=True, slots=True)
class Way:
    """`run` returns what it found; its docstring names the calls that it makes."""

    run: Callable[[Case], Found]
    packages: tuple[str, ...] = ()
    ranks: int = 1
    processes: bool = False  # with a process group even on one rank
    dtypes: tuple[str, ...] = SINGLE
    models: tuple[str, ...] = tuple(MODELS)

    @property
    def calls(self) -> str:
        return " ".join((self.run.__doc__ or "").split())

    def missing(self) -> list[str]:
        return [name for name in self.packages if find_spec(name) is None]


TRL = ("trl", "datasets", "accelerate")
TWO = together.RANKS
WAYS: dict[str, Way] = {
    "transformers, eager": Way(alone.eager, dtypes=DTYPES),
    "transformers, SDPA": Way(alone.sdpa, dtypes=DTYPES),
    "TRL, packing": Way(alone.packed, TRL),
    "TRL, padding-free": Way(alone.padding_free, TRL),
    "DeepSpeed, tiles": Way(
        together.tiled, ("deepspeed",), processes=True, models=("dense", "windows")
    ),
    "DeepSpeed, fused tiled loss": Way(
        together.tiled_fused, ("deepspeed",), processes=True, models=("dense", "windows")
    ),
    "farspan": Way(alone.far, dtypes=DTYPES),
    "torch, context parallelism": Way(together.context_parallel, ranks=TWO),
    "accelerate, context parallelism": Way(together.accelerate_cp, ("accelerate",), TWO),
    "DeepSpeed, Ulysses": Way(together.ulysses, ("deepspeed",), TWO),
    "accelerate, Ulysses": Way(together.accelerate_ulysses, ("accelerate", "deepspeed"), TWO),
    "farspan, ulysses: 2": Way(together.far_ulysses, ranks=TWO, dtypes=DTYPES),
    "farspan, shards: 2": Way(together.far_shards, ranks=TWO, dtypes=DTYPES),
    "farspan, ring: 2": Way(together.far_ring, ranks=TWO, dtypes=DTYPES),
}
