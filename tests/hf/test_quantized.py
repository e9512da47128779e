"""Frozen weights of four bits under adapters: the gradients of plain autograd on the same model."""

import copy
import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch

from farspan.distributed.context import ParallelContext
from farspan.engine.loss import StepInputs
from farspan.engine.step import Step
from farspan.engine.trace_steps import META, MetaKernels
from farspan.engine.verify import TWO_ROUNDINGS, VerificationRun, verify
from farspan.hf.load import add_adapters, load_model
from farspan.hf.quantized import (
    copied,
    frozen_digest,
    held_bytes,
    is_packed,
    parts_of,
    unpacked,
)
from farspan.program.layout import Layout
from farspan.program.strategies import strategy
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.engine.checks import (
    Data,
    assert_close,
    assert_same_bits,
    draw,
    errors,
    run_oracle,
    run_step,
)
from tests.engine.test_overlap import two_steps
from tests.engine.test_streamed_weights import BetweenTiers, ComputesOn
from tests.grids import part_of
from tests.oracles.simulate import simulate
from tests.ranks import run_ranks
from tests.zoo import make_model

pytest.importorskip("bitsandbytes")

TOKENS = 41
DATA = draw(TOKENS, documents=3)
SCHEDULES = {
    "grouped": replace(strategy("grouped", 4, TOKENS), chunk=12, groups=(1, 2, 1)),
    "memo": replace(strategy("memo", 4, TOKENS), chunk=17),
    "fpdt": replace(strategy("fpdt", 4, TOKENS), chunk=12, kv_block=12),
    "oomb": replace(strategy("oomb", 4, TOKENS), chunk=16),
    "recompute": strategy("recompute", 4, TOKENS),
    "checkpointed": Schedule(chunk=9, groups=4, layer_checkpoint=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose query projections have a bias, in bfloat16."""
    path = tmp_path_factory.mktemp("plain") / "model"
    torch.manual_seed(0)
    make_model("llama", attention_bias=True).bfloat16().save_pretrained(path)
    return path


@cache
def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return load_model(path=str(folder), dtype=dtype, nf4=True)


def packed(folder: Path, dtype: torch.dtype = torch.float32, rank: int = 4) -> Any:
    model = copy.deepcopy(loaded(folder, dtype))
    if rank:
        add_adapters(model, rank=rank, alpha=8.0, zero=False)
    return model


def descend(model: Any, gradients_: dict[str, torch.Tensor]) -> None:
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, gradient in gradients_.items():
            named[name].sub_(0.1 * gradient)


@pytest.mark.parametrize("name", part_of(SCHEDULES, "fpdt"))
def test_two_steps_have_the_gradients_of_plain_autograd(folder: Path, name: str) -> None:
    """In float32 it is as far from float64 as plain autograd: on the whole sqrt(2) times, two
    roundings against one, and nowhere twice as far as that at its worst. A float64 model of what
    the packed weights stand for gives the same to 1e-12."""
    ours = packed(folder)
    plain, exact = copy.deepcopy(ours), unpacked(ours, torch.float64)
    for seed in (0, 1):
        data = draw(TOKENS, documents=seed * 2, seed=seed)
        expected = run_oracle(exact, data)
        assert_close(run_step(exact, SCHEDULES[name], data), expected)
        found, beside = run_step(ours, SCHEDULES[name], data), run_oracle(plain, data)
        assert len(found.gradients) == 4 * 7 * 2
        assert all(g.any() for g in expected.gradients.values())
        mine, theirs = (errors(one.gradients, expected.gradients) for one in (found, beside))
        assert max(mine.values()) <= 2 * max(theirs.values())
        assert geometric_mean(e / theirs[n] for n, e in mine.items()) <= TWO_ROUNDINGS
        for model, outcome in (ours, found), (plain, beside), (exact, expected):
            descend(model, outcome.gradients)


def test_the_limit_of_the_rank_is_that_of_what_is_packed(folder: Path) -> None:
    plain = load_model(path=str(folder), dtype=torch.float32)
    widest = max(
        min(p.shape) for n, p in plain.named_parameters() if ".layers." in n and p.ndim > 1
    )
    packed(folder, rank=widest)
    with pytest.raises(UnsupportedError, match=rf"rank: {widest + 1} is above {widest}"):
        packed(folder, rank=widest + 1)


def test_a_folder_that_is_packed_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    packed(folder, rank=0).save_pretrained(tmp_path)
    first, again = packed(folder), load_model(path=str(tmp_path), dtype=torch.float32)
    add_adapters(again, rank=4, alpha=8.0, zero=False)
    assert frozen_digest(first) == frozen_digest(again)
    data = draw(TOKENS)
    found, expected = (run_step(m, SCHEDULES["grouped"], data) for m in (again, first))
    assert all(torch.equal(g, expected.gradients[n]) for n, g in found.gradients.items())


def test_scales_are_part_of_the_frozen_weights(folder: Path) -> None:
    model = packed(folder)
    before, state = (
        frozen_digest(model),
        model.model.layers[2].mlp.up_proj.base_layer.weight.quant_state,
    )
    state.state2.absmax += 1e-6
    assert frozen_digest(model) != before


def test_what_evaluates_keeps_its_gradients(folder: Path) -> None:
    """bitsandbytes packs weights anew on some processors for modules that evaluate."""
    model = packed(folder)
    linears = [m for m in model.modules() if is_packed(m)]
    assert not any(m.support_avx512bf16_for_cpu for m in linears)
    before = frozen_digest(model)
    model.eval()
    data = draw(TOKENS)
    Step(model, SCHEDULES["grouped"]).evaluate(*data)
    assert frozen_digest(model) == before
    assert any(g.any() for g in run_step(model, SCHEDULES["grouped"], data).gradients.values())


@pytest.mark.parametrize("packed_already", [False, True])
def test_weights_that_are_packed_for_inference_are_refused(
    folder: Path, packed_already: bool
) -> None:
    """As those of one's own model on a processor with AVX512-BF16, which evaluates or has done."""
    model = packed(folder)
    linear = next(m for m in model.modules() if is_packed(m))
    linear.support_avx512bf16_for_cpu = True
    step = Step(model, SCHEDULES["grouped"])
    step(*draw(TOKENS))
    if packed_already:
        linear.weight.quant_state.packing_format_for_cpu = True
    else:
        model.eval()
    with pytest.raises(UnsupportedError, match=r"repacks .*q_proj\.base_layer for inference"):
        Step(model, SCHEDULES["grouped"])(*draw(TOKENS))


def test_it_verifies_in_the_dtype_that_it_computes_in(folder: Path) -> None:
    outcome = verify(packed(folder), SCHEDULES["grouped"], VerificationRun(tokens=TOKENS))
    assert outcome.passed
    assert outcome.dtype == "float32"
    assert outcome.checked_parameters == 4 * 7 * 2
    assert outcome.float64_error is not None
    assert outcome.float64_error <= 1e-12
    assert outcome.rule.startswith("a step with this schedule in float64 with unpacked weights:")


def test_a_wrong_step_over_packed_weights_is_seen(folder: Path) -> None:
    model = packed(folder)
    layer = model.model.layers[1].mlp.up_proj

    def wrong(_: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out if args[0].shape[1] == TOKENS else out * (1 + 1e-4)

    layer.register_forward_hook(wrong)
    assert not verify(model, SCHEDULES["grouped"], VerificationRun(tokens=TOKENS)).passed


# -- from main memory -----------------------------------------------------------------------------


def streamed(name: str) -> Schedule:
    return replace(SCHEDULES[name], weights=Tier.HOST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    part_of(
        product(SCHEDULES, [torch.float32, torch.bfloat16]),
        ("memo", torch.float32),
    ),
    ids=str,
)
def test_streamed_weights_give_the_bits_of_resident_ones(
    folder: Path, name: str, dtype: torch.dtype
) -> None:
    """Gradients of two batches added up, after an update another two, and the evaluation."""
    resident = packed(folder, dtype)
    other, frozen = copy.deepcopy(resident), frozen_digest(resident)
    steps = Step(resident, SCHEDULES[name], poison=True), Step(other, streamed(name), poison=True)
    for _ in range(2):
        expected = two_steps(resident, steps[0], DATA)
        assert_same_bits(two_steps(other, steps[1], DATA), expected)
        assert any(g.any() for g in expected.gradients.values())
        for model in (resident, other):
            descend(model, expected.gradients)
    losses = [step.evaluate(*DATA) for step in steps]
    assert torch.equal(*losses)
    assert frozen_digest(other) == frozen


def streamed_on_ranks(folder: Path) -> dict[str, float]:
    """Errors of a rank's gradients, relative to one process that holds the weights."""
    model = load_model(path=str(folder), dtype=torch.float32, nf4=True)  # copies have scales twice
    add_adapters(model, rank=4, alpha=8.0, zero=False)
    expected = run_step(model, SCHEDULES["grouped"], DATA)
    ranks = ParallelContext(Layout(ulysses=2), torch.device("cpu"))
    found = run_step(model, Step(model, streamed("grouped"), ranks=ranks), DATA)
    return errors(found.gradients, expected.gradients)


@pytest.mark.slow
def test_ranks_move_scales_to_main_memory(folder: Path) -> None:
    """Which a step did after it had looked at the model, and so took for the user's edit."""
    for found in run_ranks(2, streamed_on_ranks, folder):
        assert 0 < max(found.values()) < 1e-5


def test_streamed_bytes_are_those_of_the_packing(folder: Path) -> None:
    """In main memory, in slots of groups of 1, 2 and 1 layers, and on their way; nothing of them is
    elsewhere on the device."""
    model = packed(folder)
    of_layers = [[held_bytes(p) for p in layer.parameters()] for layer in model.base_model.layers]
    step = Step(model, streamed("grouped"))
    assert step.weights is not None
    held = sum(map(held_bytes, model.parameters()))
    assert 0 <= step.weights.nbytes - held < 5 * (16 + 256)
    parts = (part for p in model.parameters() for part in parts_of(p))
    (slab,) = {part.untyped_storage().data_ptr() for part in parts}
    assert slab == step.weights._weights._block.untyped_storage().data_ptr()
    program = step.program(1, TOKENS)
    sizes = [sum(map(sum, of_layers[a:b])) for a, b in program.groups]
    slots = [program.buffers[f"weights.slot.{n}"].bytes for n in (0, 1)]
    for slot, own in zip(slots, (max(sizes[0], sizes[2]), sizes[1]), strict=True):
        assert 0 <= slot - own < 2 * 16 + 256
    run_step(model, step, draw(TOKENS))
    assert step.copies.fetched == sum(simulate(program).fetched.values())


def test_scales_that_are_others_are_read_where_they_lie(folder: Path) -> None:
    """By the next step, as weights are."""
    resident = packed(folder)
    other = copy.deepcopy(resident)
    steps = Step(resident, SCHEDULES["grouped"]), Step(other, streamed("grouped"))
    outcomes = []
    for model, step in zip((resident, other), steps, strict=True):
        step(*DATA)
        state = model.model.layers[2].mlp.up_proj.base_layer.weight.quant_state
        state.state2.absmax = 2 * state.state2.absmax
        outcomes.append(two_steps(model, step, DATA))
    assert_same_bits(*outcomes)


def test_a_copy_of_a_layer_has_its_own_bytes_alone(folder: Path) -> None:
    """A layer is copied to where it will run, to see what it saves."""
    model = packed(folder, torch.bfloat16)
    Step(model, streamed("grouped"))
    layer = model.base_model.layers[1]
    made = copied(layer, torch.device("cpu"))
    assert frozen_digest(made) == frozen_digest(layer)
    held = [part for p in made.parameters() for part in parts_of(p)]
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in held)


def test_a_device_apart_has_the_scales_too(folder: Path) -> None:
    """On the meta device, by the code that runs on a GPU: no operator meets main memory."""
    model = packed(folder, torch.bfloat16)
    step = Step(model, streamed("grouped"), device="meta")
    step.copies, kernels = BetweenTiers(META), MetaKernels(META, torch.bfloat16)
    step.prepared_model = replace(step.prepared_model, kernels=kernels)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=META)
    prepared = step.prepared(1, TOKENS)
    with ComputesOn():
        inputs = StepInputs(ids, ids, torch.zeros_like(ids), None)
        step.runner.run(step.prepared_model, prepared, inputs, TOKENS)
    assert step.copies.fetched == sum(simulate(prepared.program).fetched.values())
    kept = (part for p in model.parameters() for part in parts_of(p))
    assert {part.device.type for part in kept} == {"cpu"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "mxfp4"}, "quantised as MXFP4, which transformers cannot train"),
        ({"quant_method": "nvfp4"}, "quantised as NVFP4, .*has no backward.*model.quantize: nf4"),
        ({"quant_method": "of our own"}, "does not know the quantised weights"),
    ],
)
def test_formats_without_gradients_are_refused_before_anything_is_loaded(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    with pytest.raises(UnsupportedError, match=rf"model\.path: .*{message}"):
        load_model(path=str(tmp_path), dtype=torch.float32)  # of a folder without weights


@pytest.mark.gpu
def test_on_a_gpu_it_is_no_less_accurate_than_plain_autograd(folder: Path) -> None:
    ours = packed(folder).cuda()
    plain, exact = copy.deepcopy(ours), unpacked(ours, torch.float64)
    here = draw(TOKENS)
    data = Data(here.input_ids.cuda(), here.labels.cuda())
    expected, beside = run_oracle(exact, data), run_oracle(plain, data)
    step = Step(ours, SCHEDULES["grouped"], poison=True)
    for _ in range(2):
        found = run_step(ours, step, data)
    mine, theirs = (errors(one.gradients, expected.gradients) for one in (found, beside))
    assert max(mine.values()) <= 2 * max(theirs.values())
