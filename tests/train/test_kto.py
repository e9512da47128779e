"""Runs with KTO's loss of single answers: TRL's numbers, and what must not change them."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from trl import KTOConfig, KTOTrainer
from trl.trainer import kto_trainer
from trl.trainer.utils import FusedCausalLMOutput

from farspan.data.corpus import Corpus, open_corpus
from farspan.data.formats import UNTRAINED
from farspan.data.tokenizers import load_tokenizer
from farspan.hf.load import load_model
from farspan.program.layout import Parallel
from farspan.spec import Reference, UnsupportedError
from farspan.train.config import DType, LoraConfig, ModelConfig, OptimizerConfig, RunConfig
from farspan.train.optimizer import learning_rate
from farspan.train.step_runner import Batches
from farspan.train.trainer import train
from tests.data.characters import character_tokenizer
from tests.grids import exhaustive
from tests.numerics import EXACT, assert_exact, relative_error
from tests.posttrain.arguments import quiet
from tests.ranks import run_ranks
from tests.train.test_losses import a_run, of
from tests.train.test_ranks import fit_all
from tests.train.tiny import (
    Quiet,
    Stopped,
    Stopping,
    assert_same_weights,
    metrics,
    weights,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
ANSWERS = [
    {
        "prompt": f"{'why ' * (n % 3)}{n}? ",
        "completion": ("yes " if n % 3 else "no ") * (1 + n % 4),
        "label": n % 3 != 0,
    }
    for n in range(20)
]
ALONE = SimpleNamespace(replicas=1, replica=0)
NAMES = "loss", "kl", "rewards/chosen", "rewards/rejected", "margin"


def kto_run(root: Path, name: str = "run", *, records: Any = ANSWERS, **changes: Any) -> RunConfig:
    """Two updates of two batches of two sequences of some three answers, with a frozen copy."""
    run, path = a_run(root, name), root / "answers.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = replace(run.data, path=str(path), format="unpaired")  # type: ignore[arg-type]
    loss = of("kto", reference="frozen", desirable_weight=1.5, undesirable_weight=0.5, beta=0.3)
    return replace(run, data=data, loss=loss, **changes)


def updates(run: RunConfig) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def assert_same_run(run: RunConfig, other: RunConfig) -> None:
    for one, two in zip(metrics(run), metrics(other), strict=True):
        for key in (*NAMES, *(f"heldout_{name}" for name in NAMES)):
            assert (key in one) == (key in two), key
            assert one.get(key, 0) == pytest.approx(two.get(key, 0), rel=1e-10, abs=1e-13), key
    for name, tensor in weights(run).items():
        assert relative_error(tensor, weights(other)[name]) < EXACT, name


def in_float64(model: Any, *_: Any, **__: Any) -> None:
    """Give a model the outputs of TRL's fused head, which computes them in float32."""
    plain = model.forward

    def forward(*, labels: Any, fused_lm_head: bool, **inputs: Any) -> FusedCausalLMOutput:
        assert fused_lm_head
        logits = plain(**inputs).logits[:, :-1]
        normal, targets, zero = logits.log_softmax(-1), labels[:, 1:], logits.new_zeros(())
        found = normal.gather(2, targets.clamp(min=0)[..., None])[..., 0]
        found = found.where(targets != UNTRAINED, zero)
        return FusedCausalLMOutput(log_probs=found, entropy=found * 0, mean_logits=found * 0)

    model.forward = forward


def test_a_run_has_trl_s_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of an update are one batch of a KTOTrainer, in the order of the sequences: four
    a sequence, as all records have 20 characters."""
    monkeypatch.setenv("CI", "1")  # TRL's word for: report nothing to anybody
    monkeypatch.setattr(kto_trainer, "add_fused_lm_head", in_float64)
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    plain = OptimizerConfig(lr=1e-2, warmup=1, weight_decay=0.0, clip=None)
    cuts = [3 + 5 * n % 14 for n in range(32)]
    records = [
        {"prompt": chr(97 + n) * cut, "completion": "-" * (20 - cut), "label": cut % 5 > 0}
        for n, cut in enumerate(cuts)
    ]
    run = kto_run(tmp_path, records=records, context=100, optimizer=plain)
    run = replace(run, data=replace(run.data, tokenizer=str(tmp_path / "tokenizer"), held_out=0.0))
    train(run, reporter=Quiet())
    batch = corpus_of(run).train.batch(range(8))
    rows = [records[one.number] for row in batch.answers for one in row]
    assert [len(row) for row in batch.answers] == [4] * 8
    model: Any = load_model(path=run.model.path, dtype=torch.float64)
    optimizer = AdamW(model.parameters(), lr=1.0, betas=plain.betas, weight_decay=0.0)
    arguments = {
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "bf16": False,
        "beta": 0.3,
        "desirable_weight": 1.5,
        "undesirable_weight": 0.5,
        "max_grad_norm": 0.0,
    }
    trainer = KTOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=KTOConfig(**quiet(tmp_path / "trl", **arguments)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, LambdaLR(optimizer, learning_rate(plain, run.steps))),
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "kl" in line]
    theirs = *NAMES[1:4], "rewards/margins"
    for line, other in zip(updates(run), logs, strict=True):
        found = torch.tensor([line[name] for name in NAMES[1:]], dtype=torch.float64)
        wanted = torch.tensor([other[name] for name in theirs], dtype=torch.float64)
        assert_exact(found, wanted)
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)  # of which it logs 4 digits
    assert updates(run)[1]["kl"] > 0
    for name, tensor in weights(run).items():
        assert relative_error(tensor, model.get_parameter(name)) < EXACT, name


def corpus_of(run: RunConfig) -> Corpus:
    use = load_tokenizer(str(run.data.tokenizer))
    return open_corpus(run.data, use, context=run.context, seed=run.seed, watch=lambda *_: None)


@pytest.mark.parametrize("reference", ["stored", exhaustive("adapters-off")])
def test_references_are_the_same_numbers(tmp_path: Path, reference: str) -> None:
    """In updates and evaluations, also of answers after other prompts."""
    lora = LoraConfig(rank=4) if reference == "adapters-off" else None
    model = ModelConfig(path=str(tmp_path / "base"), dtype=DType.FLOAT64, lora=lora)
    run = kto_run(tmp_path, model=model, steps=3)
    loss = replace(run.objective, reference=Reference(reference))
    other = replace(run, folder=str(tmp_path / "other"), loss=loss)
    for one in (run, other):
        train(one, reporter=Quiet())
    assert_same_run(other, run)
    assert {f"heldout_{name}" for name in NAMES} <= metrics(run)[0].keys()
    assert len({line["rewards/chosen"] for line in updates(run)}) == 3


@pytest.mark.exhaustive
def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = kto_run(tmp_path, "whole", steps=3)
    parts = replace(whole, folder=str(tmp_path / "parts"))
    train(whole, reporter=Quiet())
    with pytest.raises(Stopped):
        train(parts, reporter=Stopping(2))
    train(parts, reporter=Quiet())
    assert_same_weights(parts, whole)


def test_an_update_is_one_batch_however_it_is_cut(tmp_path: Path) -> None:
    """Into batches, over replicas, and over ranks that share every sequence."""
    whole = kto_run(tmp_path, "whole", batch=4, accumulate=1)
    cut = replace(whole, folder=str(tmp_path / "cut"), batch=1, accumulate=4)
    shared = replace(whole, folder=str(tmp_path / "shared"), parallel=Parallel(ulysses=2))
    apart = replace(whole, folder=str(tmp_path / "apart"), parallel=Parallel(data=2), batch=2)
    stored = replace(apart, folder=str(tmp_path / "stored"))
    stored = replace(stored, loss=replace(whole.objective, reference=Reference.STORED))
    for run in whole, cut:
        train(run, reporter=Quiet())
    run_ranks(2, fit_all, [shared, apart, stored])
    for run in cut, shared, apart, stored:
        assert_same_run(run, whole)
    assert any(line["kl"] > 0 for line in updates(whole))


def test_one_sequence_has_no_other_prompts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^accumulate: kto needs several sequences"):
        train(kto_run(tmp_path, batch=1, accumulate=1), reporter=Quiet())


@pytest.mark.parametrize("reference", [Reference.FROZEN, Reference.STORED])
@pytest.mark.parametrize(("count", "held_out", "field"), [(1, 0.0, "path"), (3, 0.34, "held_out")])
def test_an_answer_alone_has_no_other_prompt(
    tmp_path: Path, reference: Reference, count: int, held_out: float, field: str
) -> None:
    """It would be paired with its own, which makes the divergence its own reward."""
    run = kto_run(tmp_path, records=ANSWERS[:count])
    run = replace(run, data=replace(run.data, held_out=held_out))
    run = replace(run, loss=replace(run.objective, reference=reference))
    with pytest.raises(UnsupportedError, match=rf"^data\.{field}: kto pairs .* give more records"):
        train(run, reporter=Quiet())
    assert not (Path(run.folder) / "metrics.jsonl").exists()


def test_an_evaluation_of_fewer_sequences_lacks_its_references(tmp_path: Path) -> None:
    """The stored sum is of the mismatched answers that the run began to evaluate."""
    run = kto_run(tmp_path)
    run = replace(run, data=replace(run.data, held_out=0.5))
    run = replace(run, loss=replace(run.objective, reference=Reference.STORED))
    run = replace(run, evaluation=replace(run.evaluation, sequences=4))
    with pytest.raises(Stopped):
        train(run, reporter=Stopping(1))
    fewer = replace(run, evaluation=replace(run.evaluation, sequences=2))
    with pytest.raises(UnsupportedError, match=r"evaluation\.sequences that the run began with"):
        train(fewer, reporter=Quiet())
    train(run, reporter=Quiet())


def test_one_evaluated_answer_gets_the_prompt_of_another(tmp_path: Path) -> None:
    """Of a held-out sequence that is not evaluated."""
    records = [{**record, "completion": "yes " * 12} for record in ANSWERS[:6]]
    run = kto_run(tmp_path, records=records)
    run = replace(run, data=replace(run.data, held_out=0.34))
    run = replace(run, evaluation=replace(run.evaluation, sequences=1))
    held_out = corpus_of(run).held_out
    assert held_out is not None
    assert held_out.sequences_per_epoch() == 2
    train(run, reporter=Quiet())
    assert metrics(run)[-1]["heldout_kl"] >= 0


def test_no_answer_is_paired_with_its_own_prompt(tmp_path: Path) -> None:
    """Where an epoch ends with the answer that begins the next, others are taken."""
    records = [{**record, "completion": "yes " * 12} for record in ANSWERS[:3]]
    run = kto_run(tmp_path, records=records, batch=2, accumulate=1)
    run = replace(run, data=replace(run.data, held_out=0.0))
    corpus = corpus_of(run)
    assert corpus.sequences_per_epoch() == 3
    given: Any = SimpleNamespace(run=run, corpus=corpus, world=ALONE)
    batches = Batches(given)
    repeated = 0
    for number in range(300):
        rows = corpus.train.batch([2 * number, 2 * number + 1]).answers
        own, beside = (row[0].number for row in rows)
        found = batches.before(2 * number, own, "train").answers[0][0].number
        assert found != own
        assert found == beside or beside == own
        repeated += beside == own
    assert repeated


@pytest.mark.parametrize("format", ["preference", "prompt"])
def test_records_without_labels_are_refused(tmp_path: Path, format: Any) -> None:
    run = kto_run(tmp_path)
    with pytest.raises(UnsupportedError, match="kto compares single answers; give records with"):
        replace(run, data=replace(run.data, format=format))
    with pytest.raises(UnsupportedError, match="sft does not compare the answers"):
        replace(run, loss=None)
