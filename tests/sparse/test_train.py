"""A run with sparse attention: it learns by the engine's step, says so everywhere, and warns."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.attention.far import Mass, Seen
from farspan.engine.step import Step
from farspan.hf.describe import describe
from farspan.hf.load import load_model
from farspan.hf.stages import CausalLMStages
from farspan.planner.request import Question
from farspan.program.layout import Layout, Parallel
from farspan.sparse.index import Index
from farspan.sparse.pages import Fraction
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Sparse, Tier, UnsupportedError
from farspan.train import setup
from farspan.train.config import (
    CheckpointConfig,
    DType,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    SparseConfig,
)
from farspan.train.oom import lighter_schedule
from farspan.train.planning import Choice, choice_json, recall_plan
from farspan.train.sparse import REMIND, MassWatch, fraction_of, hides, mass_json
from farspan.train.trainer import train
from tests.numerics import assert_exact
from tests.ranks import run_ranks
from tests.sparse.test_index import random_index
from tests.train.planner import one_memory, plan_for, planned_components
from tests.train.tiny import MODEL, STEPS, Quiet, replaced, tiny_run

pytestmark = pytest.mark.slow

# Of 48 tokens in chunks of 8 the last chunk sees 4 + 4 + 4 of 40 before it.
SPARSE = SparseConfig(page=4, budget=4, recent=4, sinks=4)
SCHEDULE = ScheduleConfig(strategy="grouped", chunk=8, groups=1)
# Documents of one sequence each, so that there is something far to hide.
LONG = "to be or not to be, that is the question "


def sparse_run(root: Path, **changes: Any) -> RunConfig:
    run = tiny_run(root, sparse=SPARSE, schedule=SCHEDULE)
    for path in (root / "text").glob("*.txt"):
        path.write_text(path.stem + LONG * 2)
    return replace(run, **changes)


HEADS = LayerSpec(query_heads=2, kv_heads=1, head_dim=8, value_dim=8)  # of the tiny model


def indexed_run(root: Path) -> RunConfig:
    return sparse_run(root, sparse=by_index(root / "index"), steps=3)


def by_index(folder: Path) -> SparseConfig:
    return replace(SPARSE, selector="index", index_dim=4, index=str(folder))


def train_quietly(run: RunConfig) -> None:
    train(run, reporter=Quiet())


def lines(run: RunConfig) -> list[dict[str, Any]]:
    text = (Path(run.folder) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def read(run: RunConfig, name: str) -> dict[str, Any]:
    return json.loads((Path(run.folder) / name).read_text())


class Watched(Step):
    """Keeps how it was made and what it was given."""

    made: list["Watched"]

    def __init__(self, model: Any, schedule: Schedule, **keywords: Any) -> None:
        super().__init__(model, schedule, **keywords)
        self.made.append(self)
        self.calls: list[tuple[tuple[Any, ...], float]] = []

    def __call__(self, *args: Any, **keywords: Any) -> torch.Tensor:
        loss = super().__call__(*args, **keywords)
        self.calls.append((args, float(loss)))
        return loss


@pytest.fixture
def watched() -> type[Watched]:
    class Own(Watched):
        made: list[Watched] = []  # noqa: RUF012

    return Own


class TestRun:
    def test_the_step_is_sparse(self, tmp_path: Path, watched: type[Watched]) -> None:
        """The loss of the first step is that of a sparse step, and not of a dense one."""
        run = sparse_run(
            tmp_path, model=ModelConfig(config=MODEL, dtype=DType.FLOAT64), accumulate=1, steps=3
        )
        result = train(run, components=replaced(make_step=watched), reporter=Quiet())
        (step,) = watched.made
        assert step.schedule.sparse == Sparse(4, 4, 4, 4)
        args, loss = step.calls[0]
        model = load_model(config=MODEL, dtype=torch.float64, seed=run.seed)
        sparse = Schedule(chunk=8, sparse=Sparse(4, 4, 4, 4))
        expected = Step(model, sparse).evaluate(*args)
        assert_exact(torch.tensor(loss, dtype=torch.float64), expected)
        dense = Step(model, Schedule(chunk=8)).evaluate(*args)
        assert abs(float(dense - expected)) > 1e-6
        assert lines(run)[1]["loss"] == loss
        assert result.sparse

    def test_every_output_says_so(self, tmp_path: Path) -> None:
        run, quiet = sparse_run(tmp_path), Quiet()
        result = train(run, reporter=quiet)
        assert all(line["attention"] == "sparse" for line in lines(run))
        assert len(lines(run)) == STEPS + 4
        about = read(run, "about.json")
        assert about["attention"] == "sparse"
        assert about["sparse"]["budget"] == about["schedule"]["sparse"]["budget"] == 4
        assert read(run, "model/farspan.json")["attention"] == "sparse"
        assert "with sparse attention, an approximation" in result.message
        opening = "\n".join(quiet.notes[: len(quiet.notes) - 1])
        assert (
            "sparse attention, approximate: of earlier tokens it sees 4 in chosen pages of 4"
            in opening
        )
        assert "not of dense attention" in opening
        schedule = next(note for note in quiet.notes if note.startswith("schedule: "))
        assert "sparse attention" in schedule

    def test_a_run_that_hides_nothing_says_that(self, tmp_path: Path) -> None:
        """40 tokens before the last page, less the sink and the recent one, leave 36. The marks
        stay: it is another program all the same."""
        whole = replace(SPARSE, budget=36)
        run, quiet = sparse_run(tmp_path, sparse=whole, steps=3), Quiet()
        result = train(run, reporter=quiet)
        assert "sparse attention, which hides no token at this context" in result.message
        assert "approximat" not in result.message + "\n".join(quiet.notes)
        assert "not of dense attention" not in "\n".join(quiet.notes)
        assert lines(run)[0]["attention"] == read(run, "about.json")["attention"] == "sparse"

    def test_what_is_certain_to_hide_nothing(self, tmp_path: Path) -> None:
        """Whatever chunk memory that runs out leaves; a share of the pages is never certain."""
        run = sparse_run(tmp_path, context=48)
        wide = replace(SPARSE, budget=36)
        assert hides(run)
        assert not hides(replace(run, sparse=None))
        assert not hides(replace(run, sparse=wide))
        assert hides(replace(run, sparse=replace(wide, budget=32)))
        assert hides(replace(run, sparse=replace(wide, sparsity=0.5)))
        assert not hides(replace(run, sparse=replace(wide, sparsity=0.5, recent=48)))

    def test_the_planner_is_asked_for_it(self, tmp_path: Path) -> None:
        asked: list[Question] = []
        sparse = Sparse(4, 4, 4, 4)
        run = sparse_run(tmp_path, schedule=ScheduleConfig(strategy="auto"), steps=3)
        schedules = (Schedule(chunk=8, groups=1, sparse=sparse),)
        result = train(run, components=planned_components(schedules, asked=asked), reporter=Quiet())
        assert [question.sparse for question in asked] == [sparse]
        assert (
            read(run, "plan.json")["fields"]["sparse"]
            == read(run, "about.json")["schedule"]["sparse"]
        )
        assert result.comparison is not None
        assert read(run, "comparison.json") == {
            "attention": "sparse",
            **result.comparison.to_json(),
        }

    def test_a_plan_of_other_attention_is_not_kept(self) -> None:
        sparse = Sparse(4, 4, 4, 4)
        question = Question(
            describe_tiny(), RunSpec(1, 48), one_memory(), dtype="float32", sparse=sparse
        )
        for kept in (sparse, Sparse(4, 8, 4, 4), None):
            plan = plan_for(question, "mine", Schedule(chunk=8, sparse=kept))
            known = choice_json(Choice("mine", plan.schedule, plan=plan), Schedule(), Layout())
            found = recall_plan(json.loads(json.dumps(known)), question, plan_for)
            assert (found is not None) == (kept == sparse)

    @pytest.mark.parametrize("sparse", [None, Sparse(4, 4, 4, 4)])
    def test_in_another_layout_only_a_sparse_plan_that_runs_there_is_kept(
        self, sparse: Sparse | None
    ) -> None:
        question = Question(
            describe_tiny(), RunSpec(1, 48), one_memory(), dtype="float32", sparse=sparse
        )
        groups = len(question.model.layers)
        plan = plan_for(question, "mine", Schedule(chunk=8, groups=(1,) * groups, sparse=sparse))
        known = choice_json(Choice("mine", plan.schedule, plan=plan), Schedule(), Layout())
        known = json.loads(json.dumps(known))
        layouts = Layout(), Layout(data=2), Layout(pipeline=2), Layout(pipeline=1, shards=2)
        kept = [
            recall_plan(known, replace(question, layout=layout), plan_for) is not None
            for layout in layouts
        ]
        runs = groups == 2
        assert kept == [True, *([False] * 3 if sparse is None else [True, runs, False])]


class TestResuming:
    def test_another_sparse_attention_is_refused(self, tmp_path: Path) -> None:
        """And without its record, too: the checkpoint itself knows what it is of."""
        run = sparse_run(tmp_path, steps=3)
        train(run, reporter=Quiet())
        warned = replace(run, sparse=replace(SPARSE, warn_below=0.5))
        assert train(warned, reporter=Quiet()).step == 3
        other = replace(run, sparse=replace(SPARSE, budget=8))
        with pytest.raises(
            UnsupportedError, match=r"another run: sparse\.budget was 4, is now 8; set"
        ):
            train(other, reporter=Quiet())
        with pytest.raises(
            UnsupportedError, match=r"another run: sparse\.budget was 4, is now None"
        ):
            train(replace(run, sparse=None), reporter=Quiet())
        (Path(run.folder) / "config.yaml").unlink()
        with pytest.raises(UnsupportedError):
            train(replace(run, sparse=None), reporter=Quiet())


class TestIndex:
    @pytest.mark.parametrize(
        ("made", "message"),
        [
            (
                None,
                "/index holds no index of format . .*; give the folder that an index was saved to",
            ),
            (
                replace(HEADS, head_dim=4),
                "its layer 0 is for 2 query heads .* of 4 dims, but the model has",
            ),
            (HEADS, "its keys have 3 dims in layer 0, but sparse.index_dim asks for 4; set"),
        ],
    )
    def test_is_told_before_text_is_read(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        made: LayerSpec | None,
        message: str,
    ) -> None:
        monkeypatch.setattr(setup, "open_corpus", lambda *_, **__: pytest.fail("text is read"))
        if made is not None:
            random_index((made, made), 3).save(tmp_path / "index")
        with pytest.raises(UnsupportedError, match=rf"^sparse\.index: .*{message}"):
            train(indexed_run(tmp_path), reporter=Quiet())

    def test_another_one_at_its_place_is_refused(self, tmp_path: Path) -> None:
        """What is in it decides the gradients, wherever it is."""
        run, moved = indexed_run(tmp_path), tmp_path / "moved"
        random_index((HEADS, HEADS), 4).save(tmp_path / "index")
        train(run, reporter=Quiet())
        (tmp_path / "index").rename(moved)
        elsewhere = replace(run, sparse=by_index(moved))
        assert train(elsewhere, reporter=Quiet()).step == run.steps
        random_index((HEADS, HEADS), 4, seed=1).save(tmp_path / "index")
        with pytest.raises(
            UnsupportedError, match=r"trained with an index other than the one now in sparse\.index"
        ):
            train(run, reporter=Quiet())

    @pytest.mark.exhaustive
    def test_ranks_have_that_of_the_first(self, tmp_path: Path) -> None:
        run = replace(indexed_run(tmp_path), parallel=Parallel(data=2))
        random_index((HEADS, HEADS), 4).save(tmp_path / "index")
        run_ranks(2, train_quietly, run)
        assert lines(run)[-1]["step"] == run.steps

    def test_goes_with_the_model(self, tmp_path: Path) -> None:
        """Another run begins with both, from the folder of the model."""
        run, index = indexed_run(tmp_path), random_index((HEADS, HEADS), 4)
        index.save(tmp_path / "index")
        train(run, reporter=Quiet())
        shutil.rmtree(tmp_path / "index")
        model = Path(run.folder) / "model"
        assert Index.load(model / "index").digest() == index.digest()
        assert read(run, "about.json")["memory"]["index"] == index.nbytes(torch.float32)
        further = replace(
            run,
            model=ModelConfig(path=str(model)),
            folder=str(tmp_path / "further"),
            sparse=by_index(model / "index"),
        )
        assert train(further, reporter=Quiet()).step == run.steps
        train(replace(run, sparse=SPARSE, folder=str(tmp_path / "other")), reporter=Quiet())
        assert not (tmp_path / "other/model/index").exists()


class TestSelector:
    def test_a_fraction_reaches_the_engine(self, tmp_path: Path, watched: type[Watched]) -> None:
        sparse = replace(SPARSE, budget=16, sparsity=0.75)
        quiet = Quiet()
        run = sparse_run(tmp_path, sparse=sparse, steps=3)
        train(run, components=replaced(make_step=watched), reporter=quiet)
        far = watched.made[0].far
        assert far is not None
        assert far.select == Fraction(0.75)
        assert any("chosen at a sparsity of 0.75" in note for note in quiet.notes)
        assert read(run, "about.json")["sparse"]["sparsity"] == 0.75

    def test_more_than_the_budget_is_refused_before_the_first_step(self, tmp_path: Path) -> None:
        """Of 9 pages, which the smallest chunk chooses from, a quarter is left out: 7 are not
        within a budget of one."""
        quarter = replace(SPARSE, sparsity=0.25)
        run = sparse_run(tmp_path, sparse=quarter)
        message = (
            r"sparse\.sparsity: 0\.25 leaves 7 of 9 pages, more than the budget of 1; "
            r"raise sparse\.budget to 28, or sparse\.sparsity to 0\.8889$"
        )
        with pytest.raises(UnsupportedError, match=message):
            train(run, reporter=Quiet())
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        for helped in (replace(quarter, budget=28), replace(quarter, sparsity=0.8889)):
            assert fraction_of(helped, Schedule(chunk=8, sparse=helped.spec()), 48) is not None


class TestAnotherChunk:
    """A query sees its own chunk whole, so that another chunk is another function."""

    def test_is_said_when_a_run_goes_on(self, tmp_path: Path) -> None:
        checkpoints = CheckpointConfig(every=2, keep=5)
        run = sparse_run(tmp_path, steps=5, checkpoints=checkpoints)
        train(run, reporter=Quiet())
        about, quiet = read(run, "about.json"), Quiet()
        about["schedule"]["chunk"] = 4  # as after a shortage
        (Path(run.folder) / "about.json").write_text(json.dumps(about))
        shutil.rmtree(max((Path(run.folder) / "checkpoints").iterdir()))
        train(run, reporter=quiet)
        (note,) = (note for note in quiet.notes if "instead of" in note)
        assert note.startswith("schedule: chunk 8 instead of 4: sparse attention sees other tokens")


class TestSchedules:
    def test_a_lighter_one_still_begins_on_pages(self) -> None:
        question = lighter_question(Sparse(8, 16, 8, 8))
        schedule: Schedule | None = Schedule(chunk=200, groups=2, sparse=question.sparse)
        chunks = []
        while schedule is not None:
            chunks.append(schedule.chunk)
            schedule = lighter_schedule(question, schedule, (Tier.DEVICE,))
        assert all(chunk % 8 == 0 for chunk in chunks)
        assert chunks[-1] == 8

    def test_on_pages(self) -> None:
        sparse = Sparse(page=48, budget=480)
        assert Schedule(chunk=100).with_sparse(sparse) == Schedule(chunk=144, sparse=sparse)
        assert Schedule(chunk=96).with_sparse(sparse).chunk == 96
        assert Schedule(chunk=100).with_sparse(None) == Schedule(chunk=100)


def lighter_question(sparse: Sparse) -> Question:
    return Question(describe_tiny(), RunSpec(1, 200), one_memory(), dtype="float32", sparse=sparse)


def describe_tiny() -> ModelSpec:
    return describe(CausalLMStages(load_model(config=MODEL, dtype=torch.float32, seed=0)))


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
