"""The softmax over parts, and over one logit more."""

import torch

from farspan.attention.backends import add_sinks, merge_, sink_gradient
from tests.numerics import assert_exact, relative_error

SHAPE = (2, 3, 5)  # B, H, Sq


def softmax_parts(keys: list[int]) -> tuple[list[tuple[torch.Tensor, ...]], torch.Tensor]:
    """(out, lse) of each part, and the output over all keys, with scores far apart."""
    scores = 30 * torch.randn(*SHAPE, sum(keys), dtype=torch.float64)
    values = torch.randn(2, 3, sum(keys), 4, dtype=torch.float64)
    pairs = zip(scores.split(keys, -1), values.split(keys, -2), strict=True)
    return [(s.softmax(-1) @ v, s.logsumexp(-1)) for s, v in pairs], scores.softmax(-1) @ values


def test_parts_join_to_the_whole() -> None:
    parts, whole = softmax_parts([3, 1, 40, 7])
    out, lse = parts[0]
    for part in parts[1:]:
        merge_(out, lse, *part)
    assert_exact(out, whole)


def test_a_part_without_keys_weighs_nothing() -> None:
    parts, whole = softmax_parts([6])
    nothing = torch.zeros_like(whole), torch.full(SHAPE, -torch.inf, dtype=torch.float64)
    out, lse = (x.clone() for x in nothing)
    merge_(out, lse, *nothing)
    assert torch.equal(lse, nothing[1])
    assert torch.equal(out, nothing[0])
    merge_(out, lse, *parts[0])
    merge_(out, lse, *nothing)
    assert torch.equal(out, whole)
    assert torch.equal(lse, parts[0][1])


def test_parts_in_bf16_are_summed_in_fp32() -> None:
    parts, whole = softmax_parts([20] * 50)
    out, lse = (x.float() for x in parts[0])
    for part_out, part_lse in parts[1:]:
        merge_(out, lse, part_out.bfloat16(), part_lse.float())
    assert out.dtype == torch.float32
    # A sum with weights that add to one has at most the rounding of its largest part.
    assert relative_error(out, whole) <= torch.finfo(torch.bfloat16).eps


def test_a_sink_is_one_more_key_without_value() -> None:
    scores = torch.randn(*SHAPE, 6, dtype=torch.float64)
    values = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    dout = torch.randn(*SHAPE, 4, dtype=torch.float64)
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True)
    column = sinks[:, None, None].expand(*SHAPE, 1)
    with_sink = torch.cat([scores, column], -1)
    wanted = with_sink.softmax(-1)[..., :6] @ values
    (gradient,) = torch.autograd.grad(wanted, sinks, dout)
    out, lse = add_sinks(scores.softmax(-1) @ values, scores.logsumexp(-1), sinks.detach())
    assert_exact(out, wanted)
    assert_exact(lse, with_sink.logsumexp(-1))
    assert_exact(sink_gradient(dout, out, lse, sinks.detach()), gradient)
