"""A cell's exchange in pieces: while heads of one are attended to, the next are on their way.

    exchange   q, K, V 0 | q, K, V 1 |            O 0 |            O 1 |
    compute              | attend 0              | attend 1            |

What is not hidden is the first piece in and the last one out. The engine and whoever prices a
program ask here. A piece is of whole K, V heads; where there are fewer of them than pieces, query
heads of one are shared out, and its K, V come with the first piece and leave with the last. Keys on
host are streamed past a cell once, so all its heads are attended to together; a ring and sparse
attention work on all heads too.
"""

from dataclasses import dataclass

from farspan.plan.layout import Layout, Range, part
from farspan.plan.reach import sparse_of
from farspan.spec import LayerSpec, Schedule, Tier


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a rank's heads."""

    queries: Range  # query heads
    keys: Range  # the K, V heads that they attend to
    first: bool = True  # of these K, V heads: K, V come with it
    last: bool = True  # dK, dV leave with it


def pieces_of(schedule: Schedule, layout: Layout, spec: LayerSpec) -> tuple[Piece, ...]:
    """The pieces of a layer's cells that attend, in order; one where nothing is exchanged. `spec`
    has the heads of one rank."""
    together = (
        layout.ulysses == 1
        or layout.ring > 1
        or schedule.kv is Tier.HOST
        or sparse_of(schedule, spec) is not None
    )
    return cut_heads(spec, 1 if together else schedule.exchange_pieces)


def exposed(into: float, work: float, out: float, count: int) -> float:
    """Seconds that an exchange of `into` before and `out` after takes beyond the `work` that it
    goes on beside, in `count` equal pieces: what comes first goes first."""
    done, link = 0.0, into
    for place in range(1, count + 1):
        done = max(done, place * into / count) + work / count
        link = max(link, done) + out / count
    return link - work


def cut_heads(layer: LayerSpec, count: int) -> tuple[Piece, ...]:
    """At most `count` pieces of a layer's heads."""
    if not layer.attends():
        return (Piece((0, 0), (0, 0)),)
    ratio = layer.query_heads // layer.kv_heads
    if layer.kv_heads > 1 or count == 1:
        count = min(count, layer.kv_heads)
        keys = [part((0, layer.kv_heads), i, count) for i in range(count)]
        return tuple(Piece((start * ratio, stop * ratio), (start, stop)) for start, stop in keys)
    count = min(count, ratio)
    return tuple(
        Piece(part((0, ratio), i, count), (0, 1), i == 0, i == count - 1) for i in range(count)
    )
