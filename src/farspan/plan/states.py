"""Where states of recurrent layers lie: in buffers of K, V, in rows of the chunk that left them.

A state does not grow with tokens, and every chunk but the last leaves one that somebody reads. So a
layer's buffer has as many elements a token as its state takes in the shortest of those chunks,
and all that is known of K, V holds for states too: when they are there, on which tier, who frees
them. A chunk's rows hold the state of all sequences from their first byte on.
"""

from dataclasses import replace
from math import prod

from farspan.plan.layout import Layout, Range
from farspan.spec import LayerSpec, ModelSpec, Refused


def with_states(model: ModelSpec, chunks: tuple[Range, ...]) -> ModelSpec:
    """The model with rows for the states that these chunks leave. Raises Refused where one of them
    is too short for what a family runs on more than one token."""
    if not model.is_recurrent():
        return model
    shortest = min((stop - start for start, stop in chunks[:-1]), default=0)
    if shortest == 1:
        raise Refused(
            "chunk: expected at least 2 tokens with recurrent layers, which take a single token "
            "for one that is generated, got 1"
        )
    return replace(model, layers=tuple(_with_rows(layer, shortest) for layer in model.layers))


def _with_rows(layer: LayerSpec, tokens: int) -> LayerSpec:
    state = (replace(s, row=-(-prod(s.shape) // tokens) if tokens else 0) for s in layer.state)
    return replace(layer, state=tuple(state)) if layer.state else layer


def refuse_shared_states(model: ModelSpec, layout: Layout) -> None:
    """Raises Refused where ranks would share the tokens of a sequence, and so a recurrence."""
    if layout.sequence() > 1 and model.is_recurrent():
        raise Refused(
            "parallel: recurrent layers hand their state from chunk to chunk, so ranks cannot "
            "share a chunk's tokens (ulysses, shards, ring, tensor); use pipeline or data"
        )
