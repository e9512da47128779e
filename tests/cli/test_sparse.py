"""`--sparse` of `farspan train` and `farspan verify`."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from farspan.cli.verify import attention_for
from farspan.cli.with_torch import trained_model
from farspan.formatting import read_sparse
from farspan.sparse.index import Index, principal_index
from farspan.spec import Sparse
from farspan.train.config import SparseConfig, load_run
from farspan.train.step_runner import TrainingResult
from tests.cli.conftest import CONFIG, Begun, Command
from tests.grids import exhaustive

SMALL = "page=8,budget=16,recent=8,sinks=8"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run with sparse attention."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "held.txt").write_text("whether 'tis nobler in the mind to suffer " * 5)
    values: dict[str, Any] = {
        "model": {"config": CONFIG},
        "data": {
            "source": "text",
            "path": str(tmp_path / "text.txt"),
            "held_out_path": str(tmp_path / "held.txt"),
            "cache": str(tmp_path / "cache"),
            "tokenizer": "bytes",
        },
        "folder": str(tmp_path / "out"),
        "steps": 3,
        "context": 96,
        "schedule": {"strategy": "grouped", "chunk": 16},
        "sparse": {"page": 8, "budget": 16, "recent": 8, "sinks": 8, "warn_below": 0.5},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


class TestTrain:
    def test_every_word_says_so(self, command: Command, run_file: Path) -> None:
        said = command("train", str(run_file)).out.splitlines()
        assert said[-2].startswith("3 steps done with sparse attention, an approximation; ")
        losses = [line for line in said if " loss " in line and line.startswith("step ")]
        assert len(losses) >= 4
        assert all("(sparse attention" in line for line in losses)
        steps = [line for line in losses if "held-out" not in line]
        assert len(steps) == 3
        assert all(", mass 0." in line or ", mass 1." in line for line in steps)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("on", SparseConfig(warn_below=0.5)),
            ("page=16,budget=1K", SparseConfig(page=16, budget=1024, warn_below=0.5)),
            ("off", None),
        ],
    )
    def test_in_place_of_the_run_file_s(
        self,
        command: Command,
        run_file: Path,
        trained: Begun,
        text: str,
        expected: SparseConfig | None,
    ) -> None:
        """All of it but the threshold of the warning. The chunk of 16 is no whole page of 128."""
        values = yaml.safe_load(run_file.read_text())
        del values["schedule"]["chunk"]
        run_file.write_text(yaml.safe_dump(values))
        command("train", str(run_file), "--sparse", text)
        ((asked, notes),) = trained
        assert asked.sparse == expected
        dense = "sparse: dense attention replaces the run file's sparse attention"
        assert notes == ([] if expected else [dense])

    def test_a_sparsity_that_goes_is_told(
        self, command: Command, run_file: Path, trained: Begun
    ) -> None:
        values = yaml.safe_load(run_file.read_text())
        values["sparse"]["sparsity"] = 0.9
        run_file.write_text(yaml.safe_dump(values))
        command("train", str(run_file), "--sparse", SMALL)
        ((asked, notes),) = trained
        assert asked.sparse == SparseConfig(8, 16, 8, 8, warn_below=0.5)
        assert notes == ["sparse: --sparse drops the run file's sparsity: 0.9"]

    def test_an_interrupted_run_says_so_too(self) -> None:
        ended = TrainingResult(Path("out"), 2, 3, 1.0, None, 0, 2, sparse=True)
        assert "after step 2 of 3 with sparse attention, an approximation; run" in ended.message
        whole = replace(ended, hides=False).message
        assert "with sparse attention, which hides no token at this context and equals" in whole


class TestVerify:
    @pytest.mark.parametrize(
        ("text", "index"), [(None, "there"), (f"{SMALL},selector=index", "there"), (SMALL, None)]
    )
    def test_the_run_file_s_index(
        self, run_file: Path, text: str | None, index: str | None
    ) -> None:
        own = SparseConfig(page=8, budget=16, selector="index", index="there")
        found = attention_for(replace(load_run(run_file), sparse=own), text)
        assert found is not None
        assert found.index == index

    def test_exact_and_how_far_from_dense(self, command: Command, folder: Path) -> None:
        shape = ["--context", "100", "--chunk", "16", "--documents", "2", "--sparse", SMALL]
        found = command("verify", str(folder), *shape, "--json").json()
        assert found["passed"]
        assert found["max_relative_error"] <= 1e-12
        errors = found["sparse"]["dense_error"]
        assert list(errors) == ["0", "1", "2"]
        assert {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"} <= errors["0"].keys()
        assert found["sparse"]["gradient_error"] > 1e-6
        said = " ".join(command("verify", str(folder), *shape).out.split())
        assert "exact as the sparse function, not as dense attention" in said
        assert "APPROXIMATE: relative error of gradients against dense attention" in said
        assert "nothing is hidden" not in said

    def test_what_is_broken_fails(
        self, command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("farspan.sparse.engine.BufferPages.add", lambda *_: None)
        shape = ["--context", "100", "--chunk", "16", "--sparse", SMALL]
        assert (
            "NOT exact as the sparse function, not as dense attention"
            in command("verify", str(folder), *shape, code=1).out
        )

    def test_where_nothing_is_hidden_it_says_so(self, command: Command, folder: Path) -> None:
        said = " ".join(
            command("verify", str(folder), "--context", "64", "--sparse", "on").out.split()
        )
        assert "nothing is hidden at this length" in said
        assert "approximat" not in said.lower()

    @pytest.mark.parametrize(
        ("arguments", "is_sparse"),
        [([], True), (["--sparse", "off"], False), exhaustive(["--chunk", "24"], True)],
    )
    def test_the_run_file_s(
        self, command: Command, run_file: Path, arguments: list[str], is_sparse: bool
    ) -> None:
        shape = ["--context", "100", "--json"]
        found = command("verify", str(run_file), *shape, *arguments).json()["sparse"]
        assert (found is not None) == is_sparse
        if is_sparse:
            assert found["pages"] == asdict(read_sparse(SMALL) or Sparse())
            assert found["selector"] == "TopK(pages=2)"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--chunk", "20"], "chunk: expected a multiple of page (8 tokens)"),
            (["--sparse", "page=24,budget=48"], "make it 24, or choose a page that divides it"),
        ],
    )
    def test_a_chunk_that_is_given_is_of_whole_pages(
        self, command: Command, run_file: Path, arguments: list[str], message: str
    ) -> None:
        assert (
            message in command("verify", str(run_file), "--context", "100", *arguments, code=2).err
        )


class TestText:
    """`farspan verify --text`: which budget keeps enough."""

    def test_a_table_and_what_follows(self, command: Command, run_file: Path) -> None:
        text = str(run_file.parent / "*.txt")
        shape = ["--text", text, "--context", "97"]
        said = command("verify", str(run_file), *shape)
        lines = said.out.splitlines()
        heading = next(line for line in lines if line.startswith("budget"))
        assert heading.split()[2:9:3] == ["submeans", "mean", "random"]
        rows = lines[lines.index(heading) + 1 :]
        assert [row.split()[:2] for row in rows[:5]] == [
            *(["0", "0"], ["8", "1"], ["16", "2"], ["32", "4"], ["64", "8"])
        ]
        # Attention of random weights is nearly even.
        assert lines[-1].startswith("try again with smaller pages and more recent tokens (--sparse")
        assert "loss of the last 24 tokens: dense" in said.out
        assert said.err.splitlines()[0] == "reading 97 tokens with dense attention"
        other = ["--sparse", "page=16,recent=0,sinks=16", "--chunk", "32", "--batch", "2"]
        found = command("verify", str(run_file), *shape, *other, "--json").json()
        assert found["budgets"] == [0, 16, 32, 48]
        assert found["queries"] == 2 * 32
        assert set(found["losses"]) == set(found["kept"]) == {"submeans", "mean", "random"}
        assert found["layers"] == [0, 1, 2]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--documents", "2"], "documents: --text is read as one document"),
            (["--sparse", "off"], "sparse: off leaves nothing to compare on --text"),
            (
                ["--context", "250", "--batch", "9"],
                "has 1,681 tokens, fewer than the required 2,250",
            ),
            (["--sparse", "page=16,recent=64,sinks=16"], "or recent=16 in --sparse"),
            (
                ["--set", "start.path=elsewhere"],
                "start: --text does not read the weights of elsewhere",
            ),
        ],
    )
    def test_what_cannot_be_compared_is_refused(
        self, command: Command, run_file: Path, arguments: list[str], message: str
    ) -> None:
        shape = ["--text", str(run_file.parent / "text.txt"), "--context", "96"]
        assert message in command("verify", str(run_file), *shape, *arguments, code=2).err


class TestIndex:
    """`farspan index`: made by a command, named by a run."""

    def test_a_run_names_it_makes_it_and_trains_with_it(
        self, command: Command, run_file: Path
    ) -> None:
        values = yaml.safe_load(run_file.read_text())
        folder, text = run_file.parent / "keys", str(run_file.parent / "text.txt")
        values |= {"seed": 3}  # of its weights, which it has no folder of
        values["model"] = {"config": CONFIG | {"max_position_embeddings": 1200}}
        values["sparse"] |= {"selector": "index", "index": str(folder), "index_dim": 2}
        run_file.write_text(yaml.safe_dump(values))
        longer = ["--context", "1200"]
        assert "or make one with farspan index" in command("train", str(run_file), code=2).err
        assert (
            f"index: {folder}, index_dim: 2}}"
            in command("index", str(run_file), "--text", text, *longer).out
        )
        ids = torch.tensor([list(Path(text).read_bytes()[:1024])])
        model, _ = trained_model(str(run_file), load_run(run_file), "float32", 3)
        expected = principal_index(model, ids, 2, 1200)
        assert Index.load(folder).digest() == expected.digest()
        command("train", str(run_file))
        wide = ["--dim", "9", "-o", str(folder / "wide")]  # heads have 8
        assert (
            "wide: an index of 8 dims" in command("index", str(run_file), "--text", text, *wide).out
        )
        short = ["--text", str(run_file.parent / "held.txt"), "-o", str(folder / "new"), *longer]
        assert (
            "fewer than the required 1,024; give more text\n"
            in command("index", str(run_file), *short, code=2).err
        )
        assert (
            f"output: {folder} exists already"
            in command("index", str(run_file), "--text", text, code=2).err
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "output: missing; give --output FOLDER"),
            (["-o", "new", "--text", "none.txt"], "--text: no file matches 'none.txt'"),
            (["-o", "new", "--context", "257"], "max_position_embeddings of 256"),
        ],
    )
    def test_what_is_refused(
        self,
        command: Command,
        run_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        arguments: list[str],
        message: str,
    ) -> None:
        monkeypatch.chdir(run_file.parent)
        given = ["--text", "text.txt", *arguments]
        assert message in command("index", "run.yaml", *given, code=2).err
        assert not Path("new").exists()
