"""A run from beginning to end, and what a user finds in its folder."""

import ctypes
import json
import mmap
import os
import re
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from farspan.data.config import DataConfig, SourceKind
from farspan.data.corpus import open_corpus
from farspan.data.tokenizers import load_tokenizer
from farspan.spec import UnsupportedError
from farspan.train.config import (
    Decay,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from farspan.train.memory import (
    TRIM_EVERY,
    grow_stack,
    resident_bytes,
    return_freed,
    trimming,
)
from farspan.train.optimizer import TrainingOptimizer, learning_rate
from farspan.train.setup import choose_device
from farspan.train.trainer import returning_freed
from farspan.train.yaml_config import build
from tests.checkpoint.saved import saved_tensors
from tests.data.test_tokenizers import save_words
from tests.ranks import PROCESSES
from tests.train.tiny import (
    MODEL,
    STEPS,
    Quiet,
    TinyStep,
    assert_same_weights,
    cells_done,
    count_trained,
    fit,
    load_tiny,
    metrics,
    tiny_run,
    weights,
)


def test_the_folder_tells_the_whole_run(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    result = fit(run)
    assert (result.step, result.signum, result.exit_code) == (STEPS, None, 0)
    assert result.message == f"{STEPS} steps done; the model is in {run.folder}/model"
    lines = metrics(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] == result.loss
    assert result.loss is not None
    assert result.loss < steps[0]["loss"]
    wanted = {"lr", "grad_norm", "tokens", "tokens_per_second", "seconds", "trained_tokens"}
    assert all(wanted <= line.keys() for line in steps)
    read = np.diff([0, *(line["tokens"] for line in steps)])
    assert all(60 < tokens <= 96 for tokens in read)  # two sequences of 48, but for their padding
    held_out = {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}
    assert list(held_out) == [0, 2, 4, 5]
    assert held_out[5] == result.heldout_loss
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["data"]["tokenizer"] == "bytes"
    assert build(RunConfig, config).optimizer == run.optimizer
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about["parameters"] == 8976
    assert about["schedule"]["chunk"] == 16384
    assert about["memory"] == {"weights": 35_904}


def test_every_batch_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    drawn: dict[int, int] = {}

    def note(step: TinyStep, calls: int) -> None:
        drawn[calls] = step.drawn  # of the held-out batches before a call, then of the call

    run = tiny_run(tmp_path)
    fit(run, note)
    batches = STEPS * run.accumulate
    assert [drawn[call] for call in range(batches)] == list(range(batches))


def test_nothing_is_evaluated_before_step_one_unless_asked(tmp_path: Path) -> None:
    """With a pass over held-out text first, a user of a long context sees no step for minutes."""
    assert not EvaluationConfig().on_start
    run = tiny_run(tmp_path)
    run = replace(run, evaluation=replace(run.evaluation, on_start=False))
    fit(run)
    assert [line["step"] for line in metrics(run)] == [1, 2, 2, 3, 4, 4, 5, 5]


def test_the_first_step_is_measured(tmp_path: Path) -> None:
    run, quiet = tiny_run(tmp_path), Quiet()
    fit(run, reporter=quiet)
    first, second, *others = (line for line in metrics(run) if "loss" in line)
    assert first["memory_predicted_bytes"] == 123_456
    # Gradients alone are four bytes a parameter.
    assert 4 * 8976 < first["memory_measured_bytes"] < 100 * 8976
    assert not any("memory_measured_bytes" in line for line in (second, *others))
    assert any("0.1 MiB predicted" in note for note in quiet.notes)
    # What the first step writes behind its peak is there at that of the second.
    resident = [line["memory_resident_bytes"] for line in (first, second)]
    assert resident[0] <= resident[1] <= second["peak_process_bytes"]
    planned = [line["memory_planned_bytes"] for line in (first, second)]
    assert planned[0] == planned[1] > first["memory_predicted_bytes"]
    assert not any("memory_resident_bytes" in line for line in others)
    assert sum("resident at most" in note for note in quiet.notes) == 1
    once = tiny_run(tmp_path / "once")
    once = replace(once, steps=1, optimizer=replace(once.optimizer, warmup=0))
    fit(once, reporter=(alone := Quiet()))
    assert sum("resident at most" in note for note in alone.notes) == 1


def in_a_process(function: Callable[[], Any]) -> Any:
    """What a function returns in a process whose heap no test has touched."""
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(function).result()


OF_GLIBC = pytest.mark.skipif(
    sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ),
    reason="thresholds of the heap are glibc's, and as they come",
)


def pieces() -> tuple[int, ...]:
    """How often the memory's return was told of, and MiB returned before and after it."""
    assert return_freed()
    take = ctypes.CDLL(None).aligned_alloc
    give, fill = ctypes.CDLL(None).free, ctypes.CDLL(None).memset
    take.restype = ctypes.c_void_p
    blocks = [take(64, 96 << 10) for _ in range(1000)]
    for block in blocks:
        fill(ctypes.c_void_p(block), 1, 96 << 10)
    for block in blocks[::2]:
        give(ctypes.c_void_p(block))
    told: list[Any] = []
    held = [resident_bytes()]
    for cell in (TRIM_EVERY - 1, TRIM_EVERY):
        returning_freed(told.append, trimming())(cells_done(cell, TRIM_EVERY))
        held.append(resident_bytes())
    return len(told), *(held[0] - now >> 20 for now in held[1:])


@OF_GLIBC
def test_pieces_of_the_heap_go_back_between_cells() -> None:
    """Of 94 MiB in blocks below the threshold every second one is freed."""
    told, before, after = in_a_process(pieces)
    assert told == 2
    assert before < 5 < 35 < after


def holes() -> int:
    """MiB that are held for every second one of 400 blocks of 512 KiB."""
    assert return_freed()
    np.ones(8 << 20).sum()  # freed, it moves glibc's threshold up to 32 MiB
    before = resident_bytes()
    blocks = [np.ones(1 << 16) for _ in range(400)]
    blocks = blocks[::2]
    return resident_bytes() - before >> 20


@OF_GLIBC
def test_freed_memory_goes_back_between_what_stays() -> None:
    """Of 200 MiB every second block is freed."""
    assert in_a_process(holes) < 110


def test_the_model_loads_where_hugging_face_loads_models(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    saved = saved_tensors(tmp_path / "run/checkpoints/step-00000005", "model/")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    words = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert words("café").input_ids == list("café".encode())


def test_updates_are_those_of_a_loop_written_out(tmp_path: Path) -> None:
    """Micro-batches, normalisation, rate and data order, against a few lines that do the same."""
    run = tiny_run(tmp_path, batch=2)
    fit(run)
    corpus = open_corpus(
        run.data, load_tokenizer("bytes"), context=48, seed=0, watch=lambda *_: None
    )
    model = load_tiny(config=MODEL, dtype=torch.float32, seed=0)
    optimizer = TrainingOptimizer(model, run.optimizer)
    for step in range(STEPS):
        batches = [corpus.train.batch([4 * step + 2 * m, 4 * step + 2 * m + 1]) for m in (0, 1)]
        places = [
            tuple(torch.from_numpy(of) for of in (b.input_ids, b.labels, b.document_ids))
            for b in batches
        ]
        total = sum(count_trained(labels, marks) for _, labels, marks in places)
        for ids, labels, marks in places:
            TinyStep(model)(ids, labels, marks, trained_tokens=total)
        optimizer.step(learning_rate(run.optimizer, STEPS)(step), optimizer.gradient_norm())
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, model.get_parameter(name)), name


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    first = fit(run)
    before = (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns
    quiet = Quiet()
    assert fit(run, reporter=quiet) == first
    assert quiet.done == []
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_a_finished_run_at_a_constant_rate_goes_on_for_more_steps(tmp_path: Path) -> None:
    constant = OptimizerConfig(lr=1e-2, warmup=1, decay=Decay.CONSTANT)
    run = tiny_run(tmp_path, optimizer=constant, steps=3)
    fit(run)
    fit(replace(run, steps=STEPS))
    whole = tiny_run(tmp_path, optimizer=constant, folder=str(tmp_path / "whole"))
    fit(whole)
    assert_same_weights(run, whole)
    with pytest.raises(UnsupportedError, match=rf"has already done {STEPS}, more than the 3 of"):
        fit(run)
    again = fit(replace(run, steps=STEPS))
    assert again.loss == fit(whole).loss


def test_evaluation_only_at_the_end(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, evaluation=EvaluationConfig(every=0, sequences=99))
    fit(run)
    (line,) = (line for line in metrics(run) if "heldout_loss" in line)
    assert line["step"] == STEPS
    assert line["heldout_tokens"] == 61 - 2  # all there are: two documents, a sequence each


def test_without_held_out_documents_there_is_no_evaluation(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run = replace(run, data=replace(run.data, held_out=0.0))
    assert fit(run).heldout_loss is None
    assert not any("heldout_loss" in line for line in metrics(run))


@pytest.mark.parametrize(("model_type", "warned"), [("llama", False), ("qwen2", True)])
def test_the_tokenizer_is_saved_with_the_model(
    tmp_path: Path, model_type: str, warned: bool
) -> None:
    """Transformers reads any tokenizer beside a Qwen2 model as Qwen2's: the user is told."""
    words, quiet = str(save_words(tmp_path / "words")), Quiet()
    run = tiny_run(
        tmp_path, context=8, model=ModelConfig(config=MODEL | {"model_type": model_type})
    )
    fit(replace(run, data=replace(run.data, tokenizer=words)), reporter=quiet)
    assert any("loads the tokenizer in" in note for note in quiet.notes) == warned
    read = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / "model")
    assert read("one two one")["input_ids"] == [3, 4, 3]


def test_a_vocabulary_too_small_is_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, model=ModelConfig(config=MODEL | {"vocab_size": 256}))
    with pytest.raises(
        UnsupportedError, match=r"data\.tokenizer: its ids go up to 256, but .* only 256;"
    ):
        fit(run)
    records = tmp_path / "ids.jsonl"
    records.write_text('{"input_ids": [1, 2, 300]}\n')
    data = DataConfig(source=SourceKind.JSONL, path=str(records), cache=run.data.cache)
    with pytest.raises(
        UnsupportedError, match=r"data\.format: the input_ids of .*ids\.jsonl go up to 300, b"
    ):
        fit(replace(run, data=data))


def test_data_that_changed_under_a_run_is_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    (tmp_path / "text" / "00.txt").write_text("something else")
    with pytest.raises(UnsupportedError, match=r"another run: the text under .* has changed"):
        fit(run)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpu7", "mps", "meta", "cuda:-1"):
        with pytest.raises(
            UnsupportedError, match=f"device: cannot train on '{name}'; give auto, cpu"
        ):
            choose_device(name)
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(
        UnsupportedError, match=r"device: cuda:2 does not exist; this machine has 2 GPU\(s\);"
    ):
        choose_device("cuda:2")


def deeper(calls: int) -> Any:
    return sorted([1], key=lambda _: deeper(calls - 1)) if calls else 0


def recurse_where_memory_is_full() -> None:
    grow_stack()
    size = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**20,) * 2)
    sys.setrecursionlimit(3000)
    held = []
    try:
        while True:
            held.append(mmap.mmap(-1, mmap.PAGESIZE))
    except OSError:
        del held[-8:]
    with suppress(MemoryError):
        deeper(800)


def grow_a_small_stack() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (512 << 10,) * 2)  # `ulimit -s`
    grow_stack()


def exit_code(function: Callable[[], None]) -> int | None:
    process = PROCESSES.Process(target=function)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the address space that is kept")
def test_a_full_address_space_is_an_error_and_no_segmentation_fault() -> None:
    """Of `ulimit -v`: a stack that has grown needs no more of it."""
    assert exit_code(recurse_where_memory_is_full) == 0
    assert exit_code(grow_a_small_stack) == 0
