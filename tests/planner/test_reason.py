"""Why a plan was chosen, in words."""

from dataclasses import replace

import pytest

from farspan.planner.remedies import reason_of
from tests.report.cases import GIB, fitting, overrun


@pytest.mark.parametrize(
    ("host", "device", "seconds", "words"),
    [
        (
            120,
            30,
            255.0,
            "the fastest plan takes 20.0 GiB more main memory to save at most 0.4% of the time",
        ),
        (100, 31, 255.9999, "1.0 GiB more device memory to save at most 0.1% of the time"),
        (120, 30, 256.0, ""),
    ],
)
def test_what_the_fastest_would_take_is_said(
    host: int, device: int, seconds: float, words: str
) -> None:
    plan, fastest = fitting(), fitting()
    fastest = replace(
        fastest,
        host=replace(plan.host, parts={"attention": host * GIB}),
        device=replace(plan.device, parts={"weights": device * GIB}),
        seconds=replace(plan.seconds, total=seconds),
    )
    reason = reason_of(plan, [fastest, overrun()])
    assert words in reason if words else "the fastest plan takes" not in reason
