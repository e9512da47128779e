"""Cross-entropy and its gradient in place of the logits, against PyTorch's."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from farspan.kernels.operations import LOSS_BLOCK, cross_entropy
from farspan.kernels.reference import losses
from tests.grids import crossed
from tests.kernels.cases import (
    BRAIN,
    HALF,
    INTERPRETED,
    Run,
    assert_no_less_accurate,
    differentiated,
    gradients,
    on_gpu,
    place_of,
    spread,
)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

SCALE = 1 / 7
IGNORED = -100


def check(run: Run, logits: Tensor, targets: Tensor, softcap: float | None = None) -> None:
    def formula(x: Tensor) -> Tensor:
        return losses(x, targets.to(x.device), IGNORED, softcap)

    weights = torch.full((len(logits),), SCALE)
    exact, (right,) = gradients(formula, weights, logits.double())
    plain, (usual,) = gradients(formula, weights, logits, place=place_of(run))
    read = run(partial(cross_entropy, softcap=softcap), logits, targets)
    found, gradient = run(differentiated, logits, targets, SCALE, softcap)
    assert torch.equal(read, found)
    assert_no_less_accurate(found, exact, plain)
    assert_no_less_accurate(gradient, right, usual)
    ignored = targets == IGNORED
    assert not found[ignored].any()
    assert not gradient[ignored].any()


def drawn(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Some targets are ignored; the first and the last logit are targets."""
    targets = torch.randint(0, size, (rows,))
    targets[::3] = IGNORED
    targets[1], targets[2] = 0, size - 1
    return torch.randn(rows, size).mul(3).to(dtype), targets


# Of one block, of exactly two, and of three of which the last is ragged.
@pytest.mark.parametrize(
    ("size", "dtype", "softcap"),
    crossed([1, 5, 1000, 2 * LOSS_BLOCK, 2 * LOSS_BLOCK + 1001], INTERPRETED, [None, 4.0]),
    ids=str,
)
def test_loss(size: int, dtype: torch.dtype, softcap: float | None, interpreted: Run) -> None:
    check(interpreted, *drawn(5, size, dtype), softcap)


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
def test_extreme_logits(dtype: torch.dtype, interpreted: Run) -> None:
    """A target that is certain, one that is impossible, all equal, and -inf in whole blocks."""
    logits = torch.zeros(6, LOSS_BLOCK + 3)
    targets = torch.tensor([7, 7, 7, LOSS_BLOCK + 1, LOSS_BLOCK + 1, 5])
    logits[0, 7], logits[1, 9] = 1e4, 1e4
    logits[2] = -1e4
    logits[3, :LOSS_BLOCK] = -torch.inf
    logits[4] = 1e4 * (-1.0) ** torch.arange(LOSS_BLOCK + 3)
    logits[5, 6:] = -torch.inf
    check(interpreted, logits.to(dtype), targets)


def test_all_rows_ignored(interpreted: Run) -> None:
    logits = torch.full((3, 50), torch.nan)
    targets = torch.full((3,), IGNORED)
    found, gradient = interpreted(differentiated, logits, targets, SCALE, None)
    assert torch.equal(found, torch.zeros(3))
    assert torch.equal(gradient, torch.zeros(3, 50))


def test_targets_that_no_logit_is_for(interpreted: Run) -> None:
    """PyTorch ends the process on a GPU; a nan is seen where the loss is read."""
    for target in (-1, 50, 2**32):
        found = interpreted(cross_entropy, torch.randn(1, 50), torch.tensor([target]))
        assert found.isnan().all()


def test_reading_writes_nothing_and_rows_may_be_apart(interpreted: Run) -> None:
    wide, targets = drawn(4, 70, HALF)
    targets[targets >= 64] = 63
    before = wide.clone()
    read = interpreted(cross_entropy, wide[:, :64], targets)
    assert torch.equal(wide, before)
    found, gradient = interpreted(differentiated, wide[:, :64], targets, SCALE, None)
    dense, of_dense = interpreted(differentiated, before[:, :64].clone(), targets, SCALE, None)
    assert torch.equal(read, found)
    assert torch.equal(found, dense)
    assert torch.equal(gradient, of_dense)


def far_apart(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Losses and gradients, from dense rows and from rows that are spread; then what lies behind
    the last of these."""
    far = spread(torch.nn.functional.pad(logits, (0, 3)))
    of_far = cross_entropy(far[:, :-3], targets, SCALE)
    dense = logits.clone()
    found = cross_entropy(dense, targets, SCALE)
    return found, dense, of_far, far[:, :-3].clone(), far[-1, -3:].clone()


def test_more_elements_than_an_int32_counts(interpreted: Run) -> None:
    *results, behind = interpreted(far_apart, *drawn(4, 90, HALF))
    assert all(map(torch.equal, results[:2], results[2:]))
    assert not behind.any()


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("size", [5, 50257, 152064])
def test_loss_on_a_gpu(size: int, dtype: torch.dtype, softcap: float | None) -> None:
    check(on_gpu, *drawn(64, size, dtype), softcap)
