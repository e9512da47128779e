"""The quality signal of a run with sparse attention: in the record, and as a warning."""

from dataclasses import replace
from pathlib import Path

import pytest

from farspan.attention.far import Mass, Seen
from farspan.train.sparse import REMIND, MassWatch, mass_json
from farspan.train.trainer import train
from tests.sparse.test_train import SPARSE, lines, sparse_run
from tests.train.tiny import Quiet


def cell(layer: int, mean: float, minimum: float) -> Seen:
    return Seen(layer, 5, Mass(mean, minimum))


class TestQuality:
    def test_each_step_has_it(self, tmp_path: Path) -> None:
        run = sparse_run(tmp_path, accumulate=1)
        train(run, reporter=Quiet())
        steps = [line for line in lines(run) if "loss" in line]
        assert all(0 < s["attention_mass_min"] <= s["attention_mass"] < 1.001 for s in steps)
        assert min(s["attention_mass"] for s in steps) < 0.9
        layers = [line["attention_mass_layer"] for line in steps]
        assert layers in ([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])
        assert not any("attention_mass" in line for line in lines(run) if "heldout_loss" in line)

    def test_a_budget_for_everything_sees_everything(self, tmp_path: Path) -> None:
        run, quiet = sparse_run(tmp_path, sparse=replace(SPARSE, budget=48)), Quiet()
        train(run, reporter=quiet)
        steps = [line for line in lines(run) if "loss" in line]
        assert all(line["attention_mass_min"] > 0.9999 for line in steps)
        assert not any("warning" in note for note in quiet.notes)

    def test_the_mean_of_all_batches_and_the_least_of_all_queries(self) -> None:
        seen = [cell(3, 0.9, 0.2), cell(1, 0.7, 0.5)]
        assert mass_json(seen) == {
            "attention_mass": pytest.approx(0.8),
            "attention_mass_min": 0.2,
            "attention_mass_layer": 3,
        }
        assert mass_json([]) == {}
        assert mass_json([cell(0, float("nan"), float("nan"))])["attention_mass"] == "nan"

    def test_little_is_warned_of_once(self, tmp_path: Path) -> None:
        """Attention of random weights is nearly even, and 12 of 40 earlier tokens are seen."""
        run, quiet = sparse_run(tmp_path), Quiet()
        train(run, reporter=quiet)
        (warning,) = (note for note in quiet.notes if note.startswith("warning: step 1: sparse"))
        assert "less than sparse.warn_below of 90%" in warning
        assert "raise sparse.budget or sparse.recent, or make sparse.page smaller" in warning
        silent = Quiet()
        sparse = replace(SPARSE, warn_below=0.0)
        train(sparse_run(tmp_path, sparse=sparse, folder=str(tmp_path / "b")), reporter=silent)
        assert not any("warning: step" in note for note in silent.notes)

    def test_it_is_warned_of_again_after_a_while(self) -> None:
        watch, low, high = MassWatch(0.9), [cell(2, 0.8, 0.1)], [cell(2, 0.95, 0.1)]
        assert watch.warning(1, high) is None
        first = watch.warning(2, [*high, *low])
        assert first is not None
        assert "80.0% of the attention mass in layer 2 (10.0% for one query)" in first
        said = [step for step in range(3, 3 * REMIND) if watch.warning(step, low)]
        assert said == [2 + REMIND, 2 + 2 * REMIND]
        assert watch.warning(3 * REMIND + 3, high) is None
        assert watch.warning(3 * REMIND + 3, []) is None
