"""Time a training step beside Hugging Face's own path, in one run.

    python -m benchmarks.step [--out FILE] [--tokens N] [--repeats R]
                              [--short | --streamed | --logprobs]

Both train the same Qwen2-shaped model with the same weights on the same tokens. The baseline is
what a Hugging Face user has: SDPA attention, gradient checkpointing, the model's own loss. The two
take turns, so that a machine that slows down slows both; the ratio is of the fastest of each.

With `--streamed`, steps with clipping and AdamW's update instead: of weights, gradients and states
in main memory, which stream through slots, beside the same with all of them resident, and beside
the baseline under PyTorch's FSDP2 with CPUOffloadPolicy and, where it is installed, DeepSpeed's
ZeRO-3 with its offload, each as one rank. The peak is of everything that torch allocates, from the
making of the model to the end of a step.

With `--short`, a step of one chunk and one group, of which nothing is computed again, as `auto`
plans where everything fits, beside transformers without gradient checkpointing.

With `--logprobs`, a forward that gives log-probabilities and then its backward, beside the one-pass
step of the same loss, of a model of eight layers in eight groups.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.agreement import SMALL as MODEL
from benchmarks.tables import save
from farspan import Schedule, Step, strategy
from farspan.engine.memory import PeakMemory
from farspan.engine.microbench import describe_machine
from farspan.engine.streamed_weights import StreamedWeights
from farspan.hf.stages import CausalLMStages
from farspan.spec import Tier
from farspan.train.config import OptimizerConfig, StatesPlace
from farspan.train.optimizer import TrainingOptimizer

DEEP = 8  # layers, and groups, of a model whose log-probabilities are asked for


def make_model(**changes: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**MODEL | changes)).train()


def plain() -> Qwen2ForCausalLM:
    """The model as the Hugging Face path trains it where all activations fit."""
    model = make_model()
    model.set_attn_implementation("sdpa")
    return model


def checkpointed() -> Qwen2ForCausalLM:
    """The model as that path trains it otherwise."""
    model = plain()
    # transformers is renaming this; both names take the same settings.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    return model


def baseline(
    ids: Tensor, make: Callable[[], Qwen2ForCausalLM] = checkpointed
) -> Callable[[], float]:
    """A step of the Hugging Face path."""
    model = make()

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return step


def farspan_step(ids: Tensor, schedule: Schedule, **changes: int) -> Callable[[], float]:
    model = make_model(**changes)
    run = Step(model, schedule)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        return float(run(ids, ids))

    return step


def logprobs_step(ids: Tensor, schedule: Schedule, **changes: int) -> Callable[[], float]:
    """The log-probabilities first, then a backward from them."""
    model = make_model(**changes)
    run = Step(model, schedule)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        logprobs = run.logprobs(ids)
        loss = -logprobs.sum() / (ids.numel() - len(ids))
        loss.backward()
        return float(loss.detach())

    return step


def updated_step(ids: Tensor, schedule: Schedule) -> Callable[[], float]:
    """With states where the weights are."""
    model = make_model()
    states, streamed = StatesPlace.DEVICE, None
    if schedule.weights is Tier.HOST:
        states, streamed = StatesPlace.HOST, StreamedWeights(CausalLMStages(model))
    optimizer = TrainingOptimizer(model, OptimizerConfig(states=states), streamed=streamed)
    run = Step(model, schedule, weights=streamed)

    def step() -> float:
        loss = float(run(ids, ids))
        optimizer.step(1e-4, optimizer.gradient_norm())
        return loss

    return step


def fsdp2_step(ids: Tensor) -> Callable[[], float]:
    """The Hugging Face path with a shard a layer in main memory, one rank, and torch's AdamW."""
    if not distributed.is_initialized():
        store: Any = getattr(distributed, "HashStore")()  # noqa: B009 (torch does not export it)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model, policy = checkpointed(), CPUOffloadPolicy(pin_memory=False)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,  # which would be compiled
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5_000_000,  # elements; by default 2 GB for a model of 34 MB
        "stage3_prefetch_bucket_size": 5_000_000,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}


def zero3_step(ids: Tensor) -> Callable[[], float]:
    """The Hugging Face path under DeepSpeed, behind `fsdp2_step`, whose process group it takes."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    model = checkpointed()
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ZERO3
    )

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def peak_bytes(make: Callable[[], Callable[[], float]]) -> int:
    """Of a contender that is made and does one step."""
    with PeakMemory(torch.device("cpu")) as memory:
        make()()
    return memory.peak


def schedules(tokens: int) -> dict[str, Schedule]:
    """farspan with attention kept and not."""
    chunk = min(4096, tokens)
    grouped = replace(strategy("grouped", MODEL["num_hidden_layers"], tokens), chunk=chunk)
    return {
        "attention_save_fraction": grouped,
        "attention_recomputed": replace(grouped, attention_save_fraction=0.0),
    }


Contenders = dict[str, Callable[[], Callable[[], float]]]


def contenders(ids: Tensor, kind: str) -> tuple[Contenders, dict[str, Schedule]]:
    """What makes each one's step, the baseline first, and farspan's schedules."""
    plans = schedules(ids.shape[1])
    resident = replace(plans["attention_save_fraction"], groups=1)
    if kind == "logprobs":
        makers: Contenders = {
            "one pass": partial(farspan_step, ids, resident, num_hidden_layers=DEEP),
            "logprobs": partial(logprobs_step, ids, resident, num_hidden_layers=DEEP),
        }
        return makers, {"one pass": resident}
    if kind == "short_step":
        layers = MODEL["num_hidden_layers"]
        whole = replace(resident, chunk=ids.shape[1], groups=layers, attention_save_fraction=0.0)
        makers = {
            "huggingface, nothing recomputed": partial(baseline, ids, plain),
            "huggingface": partial(baseline, ids),
            "one chunk": partial(farspan_step, ids, whole),
        }
        return makers, {"one chunk": whole}
    if kind == "step":
        makers = {"huggingface": partial(baseline, ids)}
        makers |= {name: partial(farspan_step, ids, plan) for name, plan in plans.items()}
        return makers, plans
    plans = {"streamed": replace(resident, weights=Tier.HOST)}
    makers = {
        "resident": partial(updated_step, ids, resident),
        "streamed": partial(updated_step, ids, plans["streamed"]),
        "fsdp2": partial(fsdp2_step, ids),
    }
    if find_spec("deepspeed"):
        makers["zero3"] = partial(zero3_step, ids)
    return makers, plans


BASELINES = {
    "step": "transformers, SDPA, gradient checkpointing",
    "short_step": "transformers, SDPA, nothing recomputed",
    "streamed_step": "resident",
    "logprobs": "one pass",
}


def measure(tokens: int, repeats: int, kind: str = "step") -> dict[str, Any]:
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens), generator=torch.manual_seed(1))
    makers, plans = contenders(ids, kind)
    first, model = next(iter(makers)), MODEL
    if kind == "logprobs":
        model = model | {"num_hidden_layers": DEEP}
    peaks = {name: peak_bytes(maker) for name, maker in makers.items()}
    steps = {name: maker() for name, maker in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}  # which others' work adds less to
    losses = {}
    for _ in range(repeats):
        for name, step in steps.items():
            start, used = time.perf_counter(), time.process_time()
            losses[name] = step()
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "benchmark": kind,
        "machine": describe_machine(),
        "model": model,
        "dtype": "float32",
        "tokens": tokens,
        "baseline": BASELINES[kind],
        "schedules": {name: asdict(plan) for name, plan in plans.items()},
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": peaks,
        "deepspeed": version("deepspeed") if "zero3" in makers else None,
        "loss": losses,
        "ratio": {name: best[name] / best[first] for name in steps if name != first},
        "cpu_ratio": {name: min(cpu[name]) / min(cpu[first]) for name in steps if name != first},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    kinds = parser.add_mutually_exclusive_group()
    for kind in [*BASELINES][1:]:
        option = f"--{kind.removesuffix('_step')}"
        kinds.add_argument(option, action="store_const", const=kind, dest="kind", default="step")
    given = parser.parse_args()
    record = measure(given.tokens, given.repeats, given.kind)
    save(given.out, record)
    for name, times in record["seconds"].items():
        ratio = record["ratio"].get(name, 1.0)
        print(f"{name:22} {min(times):8.2f} s   {ratio:5.2f} of {next(iter(record['seconds']))}")


if __name__ == "__main__":
    main()
