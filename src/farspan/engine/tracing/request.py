"""What a person asks to have traced, by names, turned into a trace."""

from dataclasses import dataclass

import torch

from farspan.engine.tracing.cells import trace_cells
from farspan.engine.tracing.model import meta_model, shortened
from farspan.engine.tracing.training import ALL_OF_IT, Kept, Recording, trace_training
from farspan.memory.trace import Trace
from farspan.plan.build import build_program
from farspan.plan.cell.describe import dtype_name, model_spec
from farspan.plan.model.catalog import find_config
from farspan.plan.model.families import architecture_from
from farspan.plan.strategies import STRATEGIES, strategy
from farspan.spec import Refused, RunSpec

OWN = (
    "farspan:"  # before a strategy's name: farspan's cells, where plain training has that name too
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A model, and how it is trained."""

    model: str  # as for `farspan plan`
    contexts: tuple[int, ...]  # tokens of a sequence, of each step
    layers: int | None = None  # the first so many; None for all
    strategy: str = Kept.PLAIN
    rank: int = 0  # of adapters on every linear module of the layers; 0 trains all weights
    batch: int = 1
    dtype: str = "bf16"
    recording: Recording = ALL_OF_IT

    def trace(self) -> Trace:
        """Raises Refused naming the field."""
        if not self.contexts:
            raise Refused("context: give --context TOKENS, or --contexts with one for each step")
        own = own_strategy(self.strategy)
        config = shortened(find_config(self.model), self.layers)
        dtype: torch.dtype = getattr(torch, dtype_name(self.dtype))
        model = meta_model(config, dtype, self.rank)
        if own is None:
            found = trace_training(
                model,
                self.contexts,
                Kept(self.strategy),
                batch=self.batch,
                recording=self.recording,
            )
        else:
            spec = model_spec(architecture_from(config, self.model), self.dtype, self.rank)
            programs = {
                tokens: build_program(
                    spec, RunSpec(self.batch, tokens), strategy(own, len(spec.layers), tokens)
                )
                for tokens in set(self.contexts)
            }
            each = [programs[tokens] for tokens in self.contexts]
            found = trace_cells(model, each, recording=self.recording)
        return Trace(found.events, self._name())

    def _name(self) -> str:
        lengths = "+".join(map(str, self.contexts))
        layers = "" if self.layers is None else f", {self.layers} layers"
        adapters = f", lora {self.rank}" if self.rank else ""
        return f"{self.model} {self.strategy} {lengths}{layers}{adapters}"


def own_strategy(name: str) -> str | None:
    """Which of farspan's strategies this is; None for plain training. Raises Refused."""
    if name in tuple(Kept):
        return None
    own = name.removeprefix(OWN)
    if own not in STRATEGIES:
        known = ", ".join((*Kept, *(OWN + known for known in STRATEGIES)))
        raise Refused(f"strategy: {name!r} is not known; expected one of {known}")
    return own
