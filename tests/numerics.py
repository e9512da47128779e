"""How close two results are: the one place that knows what "equal" means in floating point."""

from torch import Tensor

EXACT = 1e-12  # float64 throughout: a few thousand roundings of 1e-16


def relative_error(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """|found - expected| / |expected| in the L2 norm, in float64.

    `least` is a lower bound of the denominator: what is zero in exact arithmetic is rounding noise
    in every computation. Without it, zero is only matched by zero. NaN counts as infinite.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm())
    if error == 0:
        return 0.0
    norm = max(float(expected.norm()), least)
    return error / norm if norm > 0 and error == error else float("inf")


def assert_exact(found: Tensor, expected: Tensor, limit: float = EXACT) -> None:
    """The relative L2 error is at most `limit`."""
    error = relative_error(found, expected)
    assert error <= limit, f"relative L2 error {error:.3g} > {limit:g}"
