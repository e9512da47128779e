"""Every command and every snippet of Python in README.md, CONTRIBUTING.md, docs/ and examples/ is
known to work: it runs here as it stands, at tiny size, or a table below names what runs it."""

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from torch.distributed.run import get_args_parser
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

import farspan
from farspan.cli import app
from farspan.spec import UnsupportedError
from tests.data.characters import character_tokenizer
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md") for page in ROOT.glob(pattern)
)
STARTS = ("farspan", "torchrun", "python", "make", "pip")
MODEL = "path/to/model"  # as the pages write it
WORDS = "the longer the text, the more of it has to be kept or made again\n"

# What a line says, and what runs in its place: no page has time for tests in mind. A model by name
# has all its layers, and the machine that is measured is this one.
SMALLER = (
    (r"^farspan train$", r"\g<0> --steps 1 --set context=256"),
    (r"(memory trace .*) --context 64K --strategy", r"\1 --context 64K --layers 1 --strategy"),
    (r"--layers 4", "--layers 1"),
    (r"(plan .*--context) 1M", r"\1 64K"),
    (r"(memory trace .*--contexts) 64K,48K,56K", r"\1 4K,3K --layers 1"),
    (r"(evaluate .*)--context 1M", r"\1--context 512"),
    (r"(verify .*--text books --context) 4K", r"\1 1K"),
    (r"(verify run.yaml --context) 2048 --chunk 300", r"\1 256 --chunk 37"),
    (r"(verify run.yaml --context) 1024 --chunk 200", r"\1 256 --chunk 50"),
    (r"verify run.yaml --dtype", r"verify run.yaml --context 64 --dtype"),
    (r"(verify first.yaml --context) 512 --chunk 100", r"\1 128 --chunk 25"),
    (r"(verify .*--sparse page=16.* --context) 1024", r"\1 256"),
    (r"run.yaml --from runs/first", "next.yaml --from runs/run"),
    (r"step-00000200", "step-00000002"),
    (r"--nproc-per-node \d", "--nproc-per-node 2"),
    (r"^(torchrun .*) run.yaml", r"\1 RUN.yaml"),  # which says how ranks share it
    (
        r"(plan --model) Qwen2.5-7B --context 128K (.* --weights host .*)$",
        r"\1 Qwen2.5-0.5B --context 16K \2 --strategy fpdt",
    ),
    # The same question with one more file to write is on a page, too.
    (
        r"^farspan plan .*( --timeline step.json)( --snapshot step.pickle)?$",
        r"farspan plan --model Qwen2.5-0.5B --context 4K --machine h200\1 --snapshot step.pickle",
    ),
    (r"(--context 64K --machine h100 --host-memory 200GiB)$", r"\1 --html plan.html"),
)
# Exit codes of what a page shows to be refused, or not to fit.
CODES = {
    "farspan plan --model Qwen2.5-7B --context 128K --machine rtx4090": 1,
    "farspan plan --model Qwen3-8B --context 128K --machine rtx4090": 1,
}
# Lines that do not run here, and what runs the like of them. A line that no page has any more, or a
# test that is not there, fails.
ELSEWHERE = {
    "make check": "every submission",
    "make durations": "tests/test_durations.py",
    "make format": "it rewrites the sources",
    "make mutants": "tests/mutants: minutes",
    "make native-test": "packages/farspan-memory/tests/native: minutes",
    "make test": "every submission",
    "make test-all": "before a release",
    "make test-versions": "makes environments, with a network",
    "make site": "tests/test_site.py",
    "pip install .": "tests/test_wheel.py",
    "pip install trl==1.16.0 accelerate==1.15.0 deepspeed==0.19.8": "with a network",
    "python -m benchmarks.peers --out peers.json": "tests/test_peers.py",
    "python -m benchmarks.gpu.hour --out records": "tests/test_gpu_hour.py",
    "python -m benchmarks.gpu.hour --plan --record benchmarks/results/gpu_h100.json": (
        "tests/test_gpu_hour.py"
    ),
    "python -m benchmarks.gpu.hour --site build/gpu --record benchmarks/results/gpu_h*00.json "
    "--host-memory 105GiB --out records": "tests/test_gpu_hour.py",
    "python -m benchmarks.gpu.pack build/gpu": "tests/test_gpu_hour.py",
    "python -m benchmarks.performance records/gpu.json": "tests/test_gpu_hour.py",
    "python -m benchmarks.gpu_allocator --out FILE": (
        "packages/farspan-memory/tests/test_gpu_allocator.py"
    ),
    "python -m tests.standin farspan train run.yaml": "with a PyTorch that is built for CUDA",
    "python -m tests.standin python -m pytest -m gpu -W default": "the same",
    "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr 10.0.0.1 "
    "--master-port 29500 -m farspan train RUN.yaml": "tests/train/test_nodes.py",
    "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr 10.0.0.1 "
    "--master-port 29500 -m farspan train RUN.yaml": "tests/train/test_nodes.py",
}
# Snippets by a line of theirs, for the same.
SNIPPETS_ELSEWHERE = {
    'farspan_memory.install("stitch")': "packages/farspan-memory/tests: before CUDA starts",
    "farspan_memory.recorded(iteration=-1)": "packages/farspan-memory/tests: of an installed one",
    'farspan_memory.install("replay"': "packages/farspan-memory/tests: before CUDA starts",
    "farspan.ParallelContext(farspan.Layout(ulysses=4)": "tests/engine/test_ranks.py: four ranks",
    "layout=farspan.Layout(ulysses=4),": "tests/posttrain/test_trainer_ranks.py: four ranks",
    "weights, states = get_state_dict(": "below: two ranks save, one process loads",
    "matrices = [p for p in": "below, on two ranks and on one",
    "class LongDPOTrainer(farspan.LongContext, DPOTrainer)": "below, with shorter arguments",
}


def fenced(page: Path) -> Iterator[tuple[str, str]]:
    """Its blocks of code: language and text."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    yield from ((block[1], block[2]) for block in found)


def command_lines(page: Path) -> Iterator[str]:
    """Without comments, joined where they are continued, parted where one follows another."""
    text = "\n".join(text for kind, text in fenced(page) if kind in ("", "bash", "sh", "console"))
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        line = re.sub(r"\s+#\s.*", "", line).removeprefix("$ ").strip()
        yield from (command.removeprefix(".venv/bin/") for command in line.split(" && "))


def commands() -> dict[str, Path]:
    """Every command once, and the first page that has it."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for command in command_lines(page):
            if command.split(" ")[0] in STARTS:
                found.setdefault(command, page)
    return found


COMMANDS = commands()
OF_EXAMPLES = {c for c, page in COMMANDS.items() if page.parent.parent.name == "examples"}
RUN_HERE = [c for c in COMMANDS if c not in ELSEWHERE and c not in OF_EXAMPLES]
# Whose results other lines speak of.
MADE = re.compile(r"-o \w+\.trace$|--folder runs/")
FIRST = [
    "farspan train run.yaml",
    "farspan train first.yaml",
    *(c for c in RUN_HERE if MADE.search(c)),
]
# 15 s and more of search, or three processes that import torch.
SLOW = [c for c in RUN_HERE if "--max-context" in c or c.startswith("torchrun")]


def test_there_are_commands_and_all_are_real() -> None:
    """Options, strategies and presets are there; recipes and targets, too."""
    assert len(RUN_HERE) > 30
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    group = typer.main.get_command(app)
    for line in COMMANDS:
        words = shlex.split(line)
        if "farspan" in words and words[0] != "pip":
            rest = words[words.index("farspan") + 1 :]
            command: Any = group
            context = group.context_class(group, info_name="farspan")
            while hasattr(command, "resolve_command"):
                _, command, rest = command.resolve_command(context, rest)
            command.make_context("farspan", list(rest))
        if words[0] == "make":
            assert words[1] in targets


def test_what_does_not_run_here_is_on_a_page_and_has_a_test() -> None:
    assert set(ELSEWHERE) <= set(COMMANDS)
    assert set(CODES) <= set(COMMANDS)
    snippets = "\n".join(text for page in PAGES for kind, text in fenced(page) if kind == "python")
    assert all(line in snippets for line in SNIPPETS_ELSEWHERE)
    for reason in (*ELSEWHERE.values(), *SNIPPETS_ELSEWHERE.values()):
        path = re.match(r"tests/[\w/.]+", reason)
        assert path is None or (ROOT / path[0]).exists(), reason


def test_commands_of_recipes_are_run_by_their_tests() -> None:
    """By name of the folder, in tests/train/test_recipes.py or in tests/posttrain."""
    pages = (ROOT / "tests").glob("*train/test_*.py")
    tests = "".join(page.read_text("utf-8") for page in pages)
    for command in OF_EXAMPLES:
        assert f'"{COMMANDS[command].parent.name}"' in tests, command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages speak of: a model, run files, texts, earlier runs, traces."""
    root = tmp_path_factory.mktemp("pages")
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / MODEL)
    for name in ("corpus", "books", "docs"):
        (root / name).mkdir()
        for number in range(8):
            (root / name / f"{number}.txt").write_text(WORDS * 30)
            (root / name / f"{number}.md").write_text(WORDS * 200)
    run = {
        "model": {"path": MODEL},
        "data": {"source": "text", "path": "corpus/*.txt", "tokenizer": "bytes", "cache": "cache"},
        "context": 512,
        "steps": 2,
        "schedule": {"strategy": "grouped", "chunk": 128},
        "evaluation": {"every": 0},
        "checkpoints": {"every": 1},
    }
    for name in ("run", "next"):
        (root / f"{name}.yaml").write_text(yaml.safe_dump(run))
    (root / "RUN.yaml").write_text(yaml.safe_dump(run | {"parallel": "auto"}))
    (root / "first.yaml").write_text(tutorial())
    return root


def tutorial() -> str:
    """The run file of the tutorial, of fewer steps."""
    page = ROOT / "docs/tutorials/first-long-run.md"
    (text,) = (text for language, text in fenced(page) if language == "yaml")
    return text.replace("context: 4096", "context: 1024").replace("steps: 10", "steps: 2")


def smaller(line: str) -> str:
    for pattern, replacement in SMALLER:
        line = re.sub(pattern, replacement, line)
    if line.startswith("farspan plan ") and not re.search(
        "--strategy|--max-context|--sparse|--weights", line
    ):
        line += " --strategy oomb"  # seconds of search, which tests of the planner have
    return line


def run(line: str) -> Any:
    """Of the command line, in this process."""
    return CliRunner().invoke(app, shlex.split(line)[1:])


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for line in FIRST:
            result = run(smaller(line))
            assert result.exit_code == 0, result.output
    return place


@pytest.fixture
def pages(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of its own, in which a line runs, whatever another has made."""
    there = tmp_path / "pages"
    shutil.copytree(trained, there)
    monkeypatch.chdir(there)
    return there


def once() -> list[Any]:
    """Lines that run, each smaller one once."""
    lines = {smaller(line): line for line in RUN_HERE if line not in FIRST}
    return [
        pytest.param(line, marks=pytest.mark.exhaustive if line in SLOW else ())
        for line in lines.values()
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("line", once())
def test_a_command_runs(line: str, tmp_path: Path) -> None:
    short = smaller(line)
    if "farspan train" in line and "--folder" not in line:
        short += f" --folder {tmp_path}"
    if line.startswith("farspan"):
        result = run(short)
        refused = isinstance(result.exception, UnsupportedError)
        found = 2 if refused else result.exit_code
        assert found == CODES.get(line, 0), (short, result.output, result.exception)
    else:
        words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(short)[1:]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def snippets() -> list[Any]:
    """Of Python, by page and line, unless a table says what runs the like of them."""
    found = []
    for page in PAGES:
        for number, (language, text) in enumerate(fenced(page)):
            if language == "python" and not any(line in text for line in SNIPPETS_ELSEWHERE):
                found.append(pytest.param(text, id=f"{page.stem}-{number}"))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of a Trainer without a GPU
@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("text", snippets())
def test_a_snippet_runs(text: str) -> None:
    """With the names that its page speaks of."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids = torch.randint(0, 256, (2, 256))
    documents = torch.zeros_like(ids)
    schedule = farspan.Schedule(chunk=128, groups=2)
    names: dict[str, Any] = {
        "farspan": farspan,
        "torch": torch,
        "Schedule": farspan.Schedule,
        "Sparse": farspan.Sparse,
        "Step": farspan.Step,
        "model": model,
        "reference": model,
        "schedule": schedule,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "input_ids": ids,
        "labels": ids,
        "document_ids": documents,
        "data": [(ids, ids, documents)],
        "rows": [{"input_ids": row, "labels": row} for row in ids],
        **{
            name: farspan.Step(model, schedule)
            for name in ("step", "reference_step")
            if re.search(rf"\b{name}\b", text)
        },
    }
    exec(compile(text, "a snippet", "exec"), names)


@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument",
    "ignore:.*gradient_checkpointing.*:FutureWarning",
    "ignore:.*precompute_ref:UserWarning",
)
def test_the_page_on_trl_trains(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snippet on short pairs, of a model with a tokenizer."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    monkeypatch.setenv("CI", "1")  # TRL's word for: report nothing to anybody
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / MODEL, MODEL)
    character_tokenizer().save_pretrained(MODEL)
    (text,) = (t for _, t in fenced(ROOT / "docs/how-to/trl.md"))
    shorter = "max_length=64, max_steps=1, report_to=[], use_cpu=True"
    text = text.replace("max_length=131072", shorter)
    text = text.replace('"auto"', "farspan.Schedule(chunk=32, groups=2)")
    rows = [{"prompt": "which?", "chosen": "this" * n, "rejected": "that"} for n in range(1, 9)]
    names: dict[str, Any] = {"farspan": farspan, "pairs": datasets.Dataset.from_list(rows)}
    exec(text, names)
    (logged,) = names["trainer"].state.log_history
    assert abs(logged["train_loss"] - math.log(2)) <= 1e-3  # adapters begin as their reference


CLUSTERS = ROOT / "docs/how-to/clusters.md"


def blocks(language: str, begins: str) -> list[str]:
    """Of the page on clusters, by language and a line of theirs."""
    return [t for kind, t in fenced(CLUSTERS) if kind == language and begins in t]


def launched(words: list[str]) -> argparse.Namespace:
    """What torchrun reads from its command line, which has to run farspan."""
    given = get_args_parser().parse_args(words)
    found = [given.training_script, *given.training_script_args[:1]]
    assert (given.module, found) == (True, ["farspan", "train"])
    return given


def test_launchers_are_started_as_the_page_on_clusters_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch file runs with stand-ins for Slurm's commands and torchrun; a Job's names agree."""
    (batch,) = blocks("bash", "#SBATCH")
    said = {
        "scontrol": "printf 'node-a\\nnode-b\\n'",
        "srun": 'shift; exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }
    for name, body in said.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in (("JOB_NUM_NODES", "2"), ("JOB_ID", "7"), ("JOB_NODELIST", "node-[a-b]")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    done = subprocess.run(["bash", "-ec", batch], capture_output=True, text=True, check=True)
    given = launched(done.stdout.splitlines())
    assert (given.nnodes, given.rdzv_endpoint, given.rdzv_id) == ("2", "node-a:29500", "7")

    (job,) = blocks("yaml", "kind: Job")
    service, described = yaml.safe_load_all(job)
    assert service["spec"]["selector"] == {"job-name": described["metadata"]["name"]}
    inside = described["spec"]["template"]["spec"]
    (container,) = inside["containers"]
    assert container["command"][0] == "torchrun"
    given = launched(container["command"][1:])
    host = f"{described['metadata']['name']}-0.{inside['subdomain']}"
    assert inside["subdomain"] == service["metadata"]["name"]
    assert given.rdzv_endpoint == f"{host}:29500"
    assert given.nnodes == str(described["spec"]["completions"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in inside["volumes"]}

    monkeypatch.setenv("PET_NNODES", "3")  # as Kubeflow's operator sets it
    assert launched(["-m", "farspan", "train", "run.yaml"]).nnodes == "3"


def own_loop_of_ranks(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The page's optimizers for three updates of one sequence over the ranks of this group, and
    its checkpoint of them: losses, and whole weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{MODEL}", dtype=torch.float32)
    ids = torch.randint(0, 256, (1, 256))
    schedule = farspan.Schedule(chunk=128, groups=2)
    size = torch.distributed.get_world_size()
    ranks = farspan.ParallelContext(farspan.Layout(ulysses=size), torch.device("cpu"))
    sharded = farspan.parallelize(model, schedule, ranks)
    step = farspan.Step(model, schedule, ranks=sharded)
    names: dict[str, Any] = {"torch": torch, "model": model, "step": step}
    names |= {"input_ids": ids, "labels": ids}
    (text,) = blocks("python", "matrices = [p for p in")
    made, update = re.split("^(?=loss = )", text, flags=re.M)
    (save,) = blocks("python", "dcp.save")
    exec(made, names)
    losses = []
    for _ in range(3):
        exec(update, names)
        losses.append(float(names["loss"]))
    exec(save.replace('"checkpoint"', f'"{folder}/checkpoint-{size}"'), names)
    shards = [(name, p) for name, p in model.named_parameters() if isinstance(p, DTensor)]
    return losses, {name: p.full_tensor().detach() for name, p in shards}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads
def test_optimizers_and_checkpoints_of_ranks(place: Path) -> None:
    """Two ranks train as one, and what they save one process loads, with the optimizers' states."""
    one, _ = run_ranks(1, own_loop_of_ranks, str(place))[0]
    losses, whole = run_ranks(2, own_loop_of_ranks, str(place))[0]
    assert one[0] > one[2]
    assert all(abs(a - b) <= 2e-6 * a for a, b in zip(one, losses, strict=True))
    names: dict[str, Any] = {"torch": torch}
    names["model"] = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place / MODEL))
    (update,) = blocks("python", "matrices = [p for p in")
    exec(update.split("loss = ")[0], names)
    (save,), (load,) = blocks("python", "dcp.save"), blocks("python", "dcp.load")
    imports = "".join(line for line in save.splitlines(True) if "import" in line)
    exec(imports + load.replace('"checkpoint"', f'"{place}/checkpoint-2"'), names)
    for name, weight in names["model"].named_parameters():
        assert torch.equal(weight, whole[name]), name
    states = [state for optimizer in names["optimizers"] for state in optimizer.state.values()]
    assert len(states) == len(whole)
    assert all(any(value.any() for value in state.values()) for state in states)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\]\([^)]*\)", "", text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    """In the repository; the site checks those of its pages once more."""
    count = 0
    for page in PAGES:
        for path, anchor in re.findall(
            r"\]\(([^)\s:#]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")
        ):
            target = page.parent / path if path else page
            assert target.exists(), (page, path)
            assert not anchor or anchor in anchors(target), (page, path, anchor)
            count += 1
    assert count > 200
