"""The helper that runs several ranks says what went wrong on which."""

import os
import time

import pytest
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this one")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


@pytest.mark.parametrize(
    ("function", "words"), [(raise_on_one, "rank 1 failed.*this one"), (die_on_one, "rank 1 died")]
)
def test_what_went_wrong_is_said(function: object, words: str) -> None:
    with pytest.raises(RankError, match=f"(?s){words}"):
        run_ranks(2, function)  # type: ignore[arg-type]


def test_a_rank_that_hangs_is_stopped() -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not answer in 3 s"):
        run_ranks(2, time.sleep, 60, seconds=3)
