"""What a model costs whose linear modules have weights of four bits, as bitsandbytes keeps them:
each block has a scale, and scales are in blocks that have one, too. A module's weight is unpacked
for each of its products, and freed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from farspan.profile.model import CellLines, KindProfile, ModelProfile, Peak
from farspan.spec import LayerSpec

BLOCK = 64  # elements that share a scale of one byte
SCALES = 256  # scales that share one of four bytes
TABLES = 4 * (16 + 256) + 4  # bytes a module: what both codes stand for, and the scales' mean

Widths = Sequence[tuple[int, int]]  # inner and outer width of each linear module of a layer


def packed_bytes(inner: int, outer: int) -> int:
    """That are held for one weight."""
    scales = _scales(inner, outer)
    return -(-inner * outer // 2) + scales + 4 * -(-scales // SCALES) + TABLES


def unpacked_bytes(inner: int, outer: int, width: int) -> int:
    """That one weight takes while it is multiplied, its scales included; `width` is the bytes of an
    element."""
    return inner * outer * width + 4 * _scales(inner, outer)


def adapted(layer: LayerSpec, rank: int) -> Widths:
    """The linear modules of a layer, all of which have adapters of this rank: behind each product
    come those of its adapter."""
    of = layer.work.products
    return tuple(
        (inner, outer)
        for (inner, outer), down, up in zip(of, of[1:], of[2:], strict=False)
        if (down, up) == ((inner, rank), (rank, outer))
    )


def packed(profile: ModelProfile, linears: Mapping[int, Widths]) -> ModelProfile:
    """The profile with such weights in these linear modules, by kind of layer. At each moment of a
    cell the largest of them is counted as unpacked."""
    width = profile.spec.element_bytes
    spared = {
        kind: sum(inner * outer * width - packed_bytes(inner, outer) for inner, outer in of)
        for kind, of in linears.items()
    }
    layers = tuple(
        replace(layer, work=replace(layer.work, packed=spared[kind]))
        for layer, kind in zip(profile.spec.layers, profile.kind_of, strict=True)
    )
    kinds = (
        _unpacking(kind, max((unpacked_bytes(*one, width) for one in linears[place]), default=0))
        for place, kind in enumerate(profile.kinds)
    )
    return replace(
        profile,
        spec=replace(profile.spec, layers=layers),
        kinds=tuple(kinds),
        variant=replace(profile.variant, nf4=True),
    )


def _unpacking(kind: KindProfile, more: int) -> KindProfile:
    """A kind of layer whose cells hold so many bytes more at every moment of a product."""
    cells = {name: _raised(lines, more) for name, lines in kind.cells.items()}
    return replace(kind, cells=cells)


def _raised(lines: CellLines, more: int) -> CellLines:
    return replace(
        lines,
        asked=_higher(lines.asked, more),
        before=_higher(lines.before, more),
        after=_higher(lines.after, more),
        backward_before=_higher(lines.backward_before, more),
        backward_after=_higher(lines.backward_after, more),
    )


def _higher(peak: Peak, more: int) -> Peak:
    return tuple((constant + more, *slopes) for constant, *slopes in peak)


def _scales(inner: int, outer: int) -> int:
    return -(-inner * outer // BLOCK)
