"""In a child: steps of farspan, one schedule and length a child."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.children import Row, add_row
from benchmarks.gpu.device import (
    draw,
    dtype_of,
    give_back,
    make_model,
    peaks,
    reset_peaks,
    synchronize,
)
from benchmarks.gpu.work import LOGPROBS, QLORA, RANK
from farspan import Schedule, Sparse, Step
from farspan.hf.load import add_adapters
from farspan.hf.quantized import settle
from farspan.host import refuse_beyond
from farspan.spec import Tier
from farspan.train.staged_states import widen_gradient

WARM_LAYERS = 1
# Steps of a GPU that are shorter are repeated: clock and power are read every 0.2 s.
LEAST_SECONDS, MOST_STEPS = 2.0, 20
ADVICE = "measure fewer tokens, or say with --host-memory what the machine has"
OneStep = Callable[[Tensor], float]  # input_ids [1, tokens] to the loss; gradients are in .grad


def run(settings: Mapping[str, Any]) -> None:
    """The arenas, a step on one layer that builds what libraries build for a shape, then one step
    or two."""
    began = time.perf_counter()
    schedule = schedule_of(settings["schedule"])
    model = prepared_model(settings, settings["layers"])
    if schedule.weights is Tier.HOST:
        model.cpu()  # drawn on the device: one core would take a minute
        give_back(settings["device"])
    step = Step(model, schedule, device=settings["device"])
    synchronize(settings["device"])
    add_row(settings, {"ready_seconds": time.perf_counter() - began})
    add_row(settings, reserve(settings, step))
    one_step = one_step_of(step, settings.get("strategy"))
    time_steps(settings, model, one_step, partial(warm_up, settings, schedule))


def warm_up(settings: Mapping[str, Any], schedule: Schedule, ids: Tensor) -> Row:
    """A step of the full length on another model, which has the first layer alone."""
    model = prepared_model(settings, WARM_LAYERS)
    step = Step(model, replace(schedule, groups=WARM_LAYERS, weights=Tier.DEVICE))
    one_step_of(step, settings.get("strategy"))(ids)
    synchronize(settings["device"])
    step.release()
    del model, step
    give_back(settings["device"])
    return {"warm_layers": WARM_LAYERS}


def prepared_model(settings: Mapping[str, Any], layers: int) -> PreTrainedModel:
    """The model with so many layers, as the strategy trains it: whole, or adapters beside weights
    of four bits."""
    model = make_model(settings, layers)
    if settings.get("strategy") == QLORA:
        pack_nf4(model, dtype_of(settings))
        add_adapters(model, rank=RANK, alpha=2.0 * RANK)
    return widened(model)


def pack_nf4(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Packs the layers' linear weights in place, as `model.quantize: nf4` loads them."""
    packed: Any = import_module("bitsandbytes.nn")
    base: Any = model.base_model
    modules: Iterable[nn.Module] = base.layers.modules()
    for parent in list(modules):
        for name, linear in list(parent.named_children()):
            if not isinstance(linear, nn.Linear):
                continue
            options = {"quant_type": "nf4", "compress_statistics": True}
            made = packed.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=dtype,
                device="meta", **options,
            )  # fmt: skip
            weight, device = linear.weight.data, linear.weight.device
            made.weight = packed.Params4bit(weight, requires_grad=False, **options).to(device)
            made.bias = linear.bias
            setattr(parent, name, made)
    settle(model, dtype)


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """The model, its gradients added up as `farspan train` has it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            widen_gradient(parameter)
    return model


def one_step_of(step: Step, strategy: str | None = None) -> OneStep:
    """A step by the mean loss, or by log-probabilities as losses of policies take it."""

    def of_logprobs(ids: Tensor) -> float:
        loss = -step.logprobs(ids).mean()
        loss.backward()
        return float(loss.detach())

    return of_logprobs if strategy == LOGPROBS else lambda ids: float(step(ids, ids))


def reserve(settings: Mapping[str, Any], step: Step) -> Row:
    """Takes the arenas of a step's full length. Raises TooLarge where main memory is short."""
    began, tokens = time.perf_counter(), settings["tokens"]
    program = step.prepared(1, tokens, is_cut=settings.get("strategy") == LOGPROBS).program
    needed, available = program.arena_bytes[Tier.HOST], settings.get("host_memory")
    refuse_beyond(needed, f"a step of {tokens:,} tokens", ADVICE, available)
    for tier, arena in step.arenas.items():
        arena.reserve(program.arena_bytes[tier])
    synchronize(settings["device"])
    sizes = {tier.value: size for tier, size in step.arena_bytes().items()}
    return {"reserve_seconds": time.perf_counter() - began, "arenas": sizes}


def schedule_of(row: Mapping[str, Any]) -> Schedule:
    """The schedule of a row that was JSON."""
    sparse = row.get("sparse")
    return Schedule(**{**row, "sparse": None if sparse is None else Sparse(**sparse)})


def time_steps(
    settings: Mapping[str, Any],
    model: nn.Module,
    one_step: OneStep,
    warm_up: Callable[[Tensor], Row],
) -> None:
    """Adds a row for the warm-up, with its own words, and one for each step, from fresh gradients
    each."""
    device, ids = settings["device"], draw(settings, settings["tokens"])
    began = time.perf_counter()
    found = warm_up(ids)
    synchronize(device)
    add_row(settings, {"warm_seconds": time.perf_counter() - began, **found})
    number, spent = 0, 0.0
    while number < settings["steps"] or (
        device == "cuda" and spent < LEAST_SECONDS and number < MOST_STEPS
    ):
        number += 1
        model.zero_grad(set_to_none=True)
        synchronize(device)
        reset_peaks(device)
        began = time.perf_counter()
        loss = one_step(ids)
        synchronize(device)
        seconds = time.perf_counter() - began
        spent += seconds
        row = {"step": number, "seconds": seconds, "ended_at": time.time(), "loss": loss}
        add_row(settings, row | peaks(device))
