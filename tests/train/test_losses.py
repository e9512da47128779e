"""Runs of preference losses and of distillation, against loops written out, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from farspan.data.config import DataConfig, LossConfig, RecordFormat, SourceKind
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.formats import UNTRAINED
from farspan.data.tokenizers import load_tokenizer
from farspan.hf.load import load_model
from farspan.planner.request import Question
from farspan.program.layout import Parallel
from farspan.spec import Schedule, UnsupportedError
from farspan.train.config import (
    CheckpointConfig,
    DType,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from farspan.train.optimizer import TrainingOptimizer, learning_rate
from farspan.train.trainer import train
from farspan.train.yaml_config import build, to_mapping
from tests.grids import exhaustive
from tests.numerics import EXACT, relative_error
from tests.ranks import RankError, run_ranks
from tests.train.planner import planned_components
from tests.train.test_ranks import WIDE, fit_all
from tests.train.tiny import (
    Quiet,
    Stopped,
    Stopping,
    assert_same_weights,
    documents,
    metrics,
    weights,
)

pytestmark = pytest.mark.slow

PAIRS = [
    {"prompt": f"{n}? ", "chosen": "yes " * (1 + n % 3), "rejected": "no " * (1 + n % 4)}
    for n in range(10)
]


def a_run(root: Path, name: str = "run", **changes: Any) -> RunConfig:
    """Two updates of two batches of two sequences, with about two pairs each, in float64."""
    base, path = root / "base", root / "pairs.jsonl"
    if not base.exists():
        load_model(config=WIDE, dtype=torch.float64, seed=5).save_pretrained(base)
        path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    data = DataConfig(
        source=SourceKind.JSONL,
        path=str(path),
        format="preference",  # type: ignore[arg-type]
        held_out=0.2,
        tokenizer="bytes",
        cache=str(root / "cache"),
    )
    run = RunConfig(
        model=ModelConfig(path=str(base), dtype=DType.FLOAT64),
        data=data,
        folder=str(root / name),
        steps=2,
        context=64,
        batch=2,
        accumulate=2,
        loss=LossConfig("dpo"),  # type: ignore[arg-type]
        schedule=ScheduleConfig(strategy="grouped", chunk=32, groups=1),
        optimizer=OptimizerConfig(lr=1e-2, warmup=1),
        evaluation=EvaluationConfig(every=1, on_start=True, sequences=2),
        checkpoints=CheckpointConfig(every=1, keep=9),
    )
    return replace(run, **changes)


def as_prompts(data: DataConfig, root: Path) -> DataConfig:
    """The chosen answers alone."""
    lines = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS]
    path = root / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replace(data, path=str(path), format=RecordFormat.PROMPT)


def of(kind: str, **fields: Any) -> LossConfig:
    return build(LossConfig, {"kind": kind, **fields})


def corpus_of(run: RunConfig) -> Corpus:
    use = load_tokenizer("bytes")
    return open_corpus(run.data, use, context=run.context, seed=0, watch=lambda *_: None)


def answers(model: nn.Module, ids: Tensor, labels: Tensor, marks: Tensor, mean: bool) -> Tensor:
    """[pairs, 2] by plain autograd, a document at a time; documents without labels are padding."""
    found = []
    for row, span in documents(ids, marks):
        targets = labels[row, span][1:]
        kept = targets != UNTRAINED
        if kept.any():
            logits = model(input_ids=ids[row, span][None]).logits[0, :-1]
            own = logits.log_softmax(-1).gather(1, ids[row, span][1:, None])[:, 0][kept]
            found.append(own.mean() if mean else own.sum())
    return torch.stack(found).view(-1, 2)


def by_hand(loss: LossConfig, policy: Tensor, reference: Tensor) -> Tensor:
    margin = (policy - reference)[:, 0] - (policy - reference)[:, 1]
    match loss.kind:
        case "dpo":
            return -logsigmoid(loss.beta * margin)
        case "ipo":
            return (margin - 1 / (2 * loss.beta)) ** 2
    odds = [p - torch.log(1 - p.exp()) for p in policy.unbind(1)]
    return -policy[:, 0] - loss.beta * logsigmoid(odds[0] - odds[1])


def loop_of(run: RunConfig, loss: LossConfig) -> tuple[nn.Module, list[dict[str, float]]]:
    """The model after the run's updates, and the metrics of each, written out."""
    model, frozen = (load_model(path=run.model.path, dtype=torch.float64) for _ in "ab")
    optimizer, told = TrainingOptimizer(model, run.optimizer), []
    packing, mean = corpus_of(run).train, loss.kind != "dpo" or loss.by_length
    for step in range(run.steps):
        starts = [(step * run.accumulate + n) * run.batch for n in range(run.accumulate)]
        batches = [packing.batch(range(s, s + run.batch)) for s in starts]
        total = sum(len(row) for batch in batches for row in batch.pairs)
        sums = dict.fromkeys(("loss", "rewards/chosen", "rewards/rejected", "accuracy"), 0.0)
        for batch in batches:
            ids, labels, marks = map(
                torch.from_numpy, (batch.input_ids, batch.labels, batch.document_ids)
            )
            policy = answers(model, ids, labels, marks, mean)
            with torch.no_grad():
                reference = answers(frozen, ids, labels, marks, mean)
            if loss.kind == "orpo":
                reference = torch.zeros_like(reference)
            value = by_hand(loss, policy, reference).sum() / total
            value.backward()
            rewards = loss.beta * (policy - reference).detach()
            sums["loss"] += float(value.detach())
            sums["rewards/chosen"] += float(rewards[:, 0].sum()) / total
            sums["rewards/rejected"] += float(rewards[:, 1].sum()) / total
            sums["accuracy"] += float((rewards[:, 0] > rewards[:, 1]).sum()) / total
        told.append(sums | {"margin": sums["rewards/chosen"] - sums["rewards/rejected"]})
        optimizer.step(learning_rate(run.optimizer, run.steps)(step), optimizer.gradient_norm())
    return model, told


@pytest.mark.parametrize(
    "loss",
    [
        exhaustive(of("dpo", reference="frozen")),
        of("dpo", reference="stored", beta=0.5, by_length=True),
        exhaustive(of("ipo")),
        of("orpo", beta=0.3),
    ],
    ids=lambda loss: f"{loss.kind} {loss.compared()}",
)
def test_a_run_is_a_loop_written_out(tmp_path: Path, loss: LossConfig) -> None:
    run = a_run(tmp_path, loss=loss)
    train(run, reporter=Quiet())
    model, told = loop_of(run, loss)
    steps = [line for line in metrics(run) if "loss" in line]
    for line, wanted in zip(steps, told, strict=True):
        for name, value in wanted.items():
            assert line[name] == pytest.approx(value, rel=1e-11, abs=1e-13), name
    for name, tensor in weights(run).items():
        assert relative_error(tensor, model.get_parameter(name)) < EXACT, name
    held_out = [line for line in metrics(run) if "heldout_loss" in line]
    assert [line["step"] for line in held_out] == [0, 1, 2]
    assert {"heldout_margin", "heldout_accuracy", "heldout_rewards/chosen"} <= held_out[0].keys()


@pytest.mark.parametrize("reference", ["stored", exhaustive("frozen"), exhaustive("adapters-off")])
def test_a_run_resumes_to_the_bit(tmp_path: Path, reference: str) -> None:
    """In the midst of its updates; what is stored is not computed again."""
    lora = LoraConfig(rank=4) if reference == "adapters-off" else None
    model = ModelConfig(path=str(tmp_path / "base"), dtype=DType.FLOAT64, lora=lora)
    loss = of("dpo", reference=reference)
    whole = a_run(tmp_path, "whole", loss=loss, model=model, steps=3)
    parts = replace(whole, folder=str(tmp_path / "parts"))
    train(whole, reporter=Quiet())
    with pytest.raises(Stopped):
        train(parts, reporter=Stopping(2))
    quiet = Quiet()
    train(parts, reporter=quiet)
    assert not any("reference: computing" in note for note in quiet.notes)
    assert any("resuming after step 1" in note for note in quiet.notes)
    assert_same_weights(parts, whole)
    dropped = {"seconds", "tokens_per_second", "peak_process_bytes"}
    for one, other in zip(metrics(whole), metrics(parts), strict=True):
        for key in one.keys() - dropped:
            if not key.startswith("memory"):
                assert one[key] == other[key], key


def test_references_agree_while_adapters_are_zero(tmp_path: Path) -> None:
    """At the first step all are the model as it is; afterwards too, as its weights stay."""
    found = {}
    for reference in ("frozen", "stored", "adapters-off"):
        lora = ModelConfig(path=str(tmp_path / "base"), dtype=DType.FLOAT64, lora=LoraConfig(4))
        run = a_run(tmp_path, reference, loss=of("dpo", reference=reference), model=lora)
        train(run, reporter=Quiet())
        found[reference] = [line for line in metrics(run) if "loss" in line]
    first = {name: lines[0] for name, lines in found.items()}
    assert first["adapters-off"]["loss"] == pytest.approx(0.6931471805599453, rel=1e-12)
    assert first["adapters-off"]["margin"] == first["frozen"]["margin"] == 0.0
    for other in ("frozen", "stored"):
        for one, two in zip(found["adapters-off"], found[other], strict=True):
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-12)
            assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-10)
    assert found["frozen"][1]["margin"] != 0.0


@pytest.mark.exhaustive
def test_weights_in_main_memory_have_the_same_loss(tmp_path: Path) -> None:
    """The reference's too."""
    there = a_run(tmp_path, "there", loss=of("dpo", reference="frozen"))
    here = replace(there, folder=str(tmp_path / "here"))
    streamed = ScheduleConfig(
        strategy="grouped",
        chunk=32,
        groups=1,
        weights="host",  # type: ignore[arg-type]
    )
    there = replace(there, schedule=streamed)
    train(there, reporter=Quiet())
    train(here, reporter=Quiet())
    for name, tensor in weights(there).items():
        assert relative_error(tensor, weights(here)[name]) < EXACT, name


def test_what_is_stored_belongs_to_its_run(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=3)
    with pytest.raises(Stopped):
        train(run, reporter=Stopping(3))
    path = tmp_path / "run" / "reference.safetensors"
    kept = path.read_bytes()
    path.write_bytes(kept[:-3])
    with pytest.raises(UnsupportedError, match=r"reference\.safetensors cannot be read"):
        train(run, reporter=Quiet())
    path.unlink()
    with pytest.raises(UnsupportedError, match=r"reference\.safetensors is missing"):
        train(run, reporter=Quiet())
    path.write_bytes(kept)
    more = EvaluationConfig(every=1, sequences=1)
    assert train(replace(run, evaluation=more), reporter=Quiet()).step == 3


def test_a_student_learns_from_a_teacher(tmp_path: Path) -> None:
    """The gradient of KL over the teacher's likeliest ids, at trained tokens, written out."""
    teacher = load_model(config=WIDE | {"num_hidden_layers": 3}, dtype=torch.float64, seed=9)
    teacher.save_pretrained(tmp_path / "teacher")
    run, loss = a_run(tmp_path), of("distill", teacher=str(tmp_path / "teacher"), top_k=5)
    run = replace(run, data=as_prompts(run.data, tmp_path), loss=loss)
    train(run, reporter=Quiet())
    model = load_model(path=run.model.path, dtype=torch.float64)
    optimizer, packing = TrainingOptimizer(model, run.optimizer), corpus_of(run).train
    for step in range(run.steps):
        starts = [(step * run.accumulate + n) * run.batch for n in range(run.accumulate)]
        losses = []
        for start in starts:
            batch = packing.batch(range(start, start + run.batch))
            ids, labels, marks = map(
                torch.from_numpy, (batch.input_ids, batch.labels, batch.document_ids)
            )
            for row, span in documents(ids, marks):
                kept = labels[row, span][1:] != UNTRAINED
                if not kept.any():
                    continue
                with torch.no_grad():
                    theirs = teacher(input_ids=ids[row, span][None]).logits[0, :-1]
                    known, top = theirs.log_softmax(-1).topk(5, -1)
                ours = model(input_ids=ids[row, span][None]).logits[0, :-1].log_softmax(-1)
                apart = known.exp() * (known - ours.gather(1, top))
                losses.append(apart.sum(-1)[kept])
        value = torch.cat(losses).mean()
        value.backward()
        line = [line for line in metrics(run) if "loss" in line][step]
        assert line["loss"] == pytest.approx(float(value.detach()), rel=1e-11)
        optimizer.step(learning_rate(run.optimizer, run.steps)(step), optimizer.gradient_norm())
    for name, tensor in weights(run).items():
        assert relative_error(tensor, model.get_parameter(name)) < EXACT, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": of("dpo", reference="adapters-off")}, "adapters-off needs model.lora"),
        ({"loss": None}, "loss.kind: sft does not compare the answers"),
        ({"sparse": {"page": 8, "budget": 8}}, "sparse: not supported with loss.kind dpo"),
        ({"data": {"source": "stdlib"}}, "dpo compares pairs of .* got text of source 'stdlib'"),
        ({"data": {"source": "jsonl", "path": "x", "format": "chat"}}, "got chat"),
        ({"start": {"path": "runs/x"}, "loss": of("dpo", reference="frozen")}, "start: loss.refe"),
        ({"start": {"path": "runs/x", "states": True}}, "start: loss.reference stored"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(RunConfig, to_mapping(a_run(tmp_path)) | to_mapping(changes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "foo"},
            "kind: expected one of sft, dpo, ipo, orpo, kto, distill, got text 'foo'$",
        ),
        ({"kind": "kpo"}, r"got text 'kpo' \(did you mean kto\?\)$"),
        ({"kind": "kto", "desirable_weight": -1}, "desirable_weight: expected a number of at "),
        ({"kind": "dpo", "desirable_weight": 2}, "desirable_weight: kind dpo does not use it"),
        ({"kind": "grpo"}, "kind: grpo: farspan train generates no answers"),
        ({"kind": "sft", "beta": 0.2}, "beta: kind sft does not use it"),
        ({"kind": "orpo", "reference": "stored"}, "reference: kind orpo does not use it"),
        ({"kind": "dpo", "reference": "none"}, "reference: dpo needs one"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing: kind ipo does not use it"),
        ({"kind": "dpo", "label_smoothing": 0.5}, "label_smoothing: expected 0 or more"),
        ({"kind": "dpo", "beta": 0.0}, "beta: expected a number above 0"),
        ({"kind": "distill"}, "teacher: missing"),
        ({"kind": "distill", "teacher": "x", "top_k": 0}, "top_k: expected at least 1"),
    ],
)
def test_a_loss_that_says_too_much_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(LossConfig, fields)


def test_records_without_answers_are_refused(tmp_path: Path) -> None:
    """Where the run file leaves their form open."""
    run = a_run(tmp_path)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "bc"}) + "\n")
    data = replace(run.data, format=RecordFormat.TEXT)
    with pytest.raises(UnsupportedError, match="compares pairs of answers; give records with"):
        train(replace(run, data=replace(data, path=str(texts), held_out=0.0)), reporter=Quiet())
    with pytest.raises(UnsupportedError, match="sft does not compare the answers"):
        train(replace(run, data=data, loss=None), reporter=Quiet())


# A teacher is a second model as a frozen reference is, and adapters are switched off as alone.
@pytest.mark.parametrize(
    "reference", ["stored", *map(exhaustive, (None, "frozen", "adapters-off"))]
)
def test_ranks_train_as_one_process_does(tmp_path: Path, reference: str | None) -> None:
    """Replicas, whose pairs are others, and ranks that share every sequence; None: a teacher."""
    lora = LoraConfig(rank=4) if reference == "adapters-off" else None
    model = ModelConfig(path=str(tmp_path / "base"), dtype=DType.FLOAT64, lora=lora)
    alone = a_run(tmp_path, "alone", model=model)
    loss = of("dpo", reference=reference)
    if reference is None:
        loss = of("distill", teacher=str(tmp_path / "base"), top_k=3)
        alone = replace(alone, data=as_prompts(alone.data, tmp_path), loss=None)
    alone = replace(alone, loss=loss)
    shared = replace(alone, folder=str(tmp_path / "shared"), parallel=Parallel(ulysses=2))
    apart = replace(alone, folder=str(tmp_path / "apart"), parallel=Parallel(data=2), batch=1)
    train(alone, reporter=Quiet())
    run_ranks(2, fit_all, [shared, apart])
    for run in shared, apart:
        for one, other in zip(metrics(alone), metrics(run), strict=True):
            for key in ("loss", "margin", "accuracy", "heldout_loss", "heldout_margin"):
                assert (key in one) == (key in other)
                near = pytest.approx(other.get(key, 0), rel=1e-10, abs=1e-13)
                assert one.get(key, 0) == near, (run.folder, key)
        for name, tensor in weights(alone).items():
            assert relative_error(weights(run)[name], tensor) < EXACT, (run.folder, name)


def test_stages_hold_one_model(tmp_path: Path) -> None:
    run = a_run(tmp_path, loss=of("dpo", reference="frozen"), parallel=Parallel(pipeline=2))
    with pytest.raises(RankError, match=r"parallel\.pipeline: stages hold the layers of only one"):
        run_ranks(2, fit_all, [run])


def test_a_planner_is_asked_for_a_cut_step(tmp_path: Path) -> None:
    asked: list[Question] = []
    written = a_run(tmp_path, "written", loss=of("dpo", reference="frozen"))
    auto = ScheduleConfig(strategy="auto")
    run = replace(written, folder=str(tmp_path / "run"), schedule=auto)
    schedule = Schedule(chunk=32, groups=1)
    train(run, components=planned_components([schedule], asked=asked), reporter=Quiet())
    train(written, reporter=Quiet())
    assert {question.loss for question in asked} == {run.objective.planned()}
    assert run.objective.planned().is_cut
    for name, tensor in weights(run).items():
        assert relative_error(tensor, weights(written)[name]) < EXACT, name
