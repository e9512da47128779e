"""Measurements, each a script that writes its numbers as data under `results/`; those of
`packages/*/benchmarks` are found here, too."""

from pathlib import Path

__path__ += map(str, sorted((Path(__file__).parents[1] / "packages").glob("*/benchmarks")))
