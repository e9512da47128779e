"""The tests mirror `src/farspan`; helpers shared by them are modules of this package, in which
those of `packages/*/tests` are found, too."""

from pathlib import Path

__path__ += map(str, sorted((Path(__file__).parents[1] / "packages").glob("*/tests")))
