"""Attention that is sparse by page: an approximation of dense attention (OOMB 4.2)."""

from farspan.lazy import attributes

# What the engine asks for (`farspan.engine.far`), loaded when it does.
__getattr__, __dir__ = attributes(
    __name__,
    {
        "SparseFunction": "farspan.sparse.reference",
        "SparseStep": "farspan.sparse.engine",
        "page_curves": "farspan.sparse.measure",
    },
)
