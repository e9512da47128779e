"""Models that somebody wrapped, as TRL, accelerate, DDP and torch.compile do: the gradients are
those of the bare model, or the wrapper is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farspan.engine.step import Step
from farspan.spec import UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.hf.test_refused import SCHEDULE
from tests.zoo import make_model

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
DATA = draw(41, documents=3)


def wrap(module: nn.Module, change: Callable[[Any], Any] = lambda out: out) -> None:
    """Sets a forward on the module itself, bound to it, as TRL's fused head and Liger's patches."""
    own = module.forward

    def forward(_: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return change(own(*arguments, **keywords))

    module.forward = MethodType(forward, module)


@pytest.mark.parametrize("where", ["", "model.layers.0.mlp"])
def test_a_forward_set_on_a_module_does_not_reach_its_copies(where: str) -> None:
    model = make_model("llama")
    expected = run_oracle(model, DATA)
    wrap(model.get_submodule(where))
    assert_close(run_step(model, SCHEDULE, DATA), expected)


def doubled(out: Any) -> Any:
    out.logits = out.logits * 2
    return out


def test_one_that_changes_results_is_refused() -> None:
    model = make_model("llama")
    wrap(model, doubled)
    with pytest.raises(
        UnsupportedError, match=r"LlamaForCausalLM .* has a replaced forward.* by 5\.0e-01"
    ):
        Step(model, SCHEDULE)


def with_z_loss(out: Any) -> Any:
    if out.loss is not None:
        out.loss = out.loss + 1e-3 * out.logits.logsumexp(-1).square().mean()
    return out


def squares(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:  # noqa: ARG001
    return logits.square().mean()


def test_another_loss_is_refused() -> None:
    """Which only whoever gives labels meets: by a forward, by a hook, by the model's own."""
    for_labels = [
        (lambda model: wrap(model, with_z_loss), "a forward that was set on it"),
        (
            lambda model: model.register_forward_hook(lambda *call: with_z_loss(call[2])),
            "a forward hook",
        ),
        (lambda model: setattr(model, "loss_function", squares), "its loss_function"),
    ]
    for change, words in for_labels:
        model = make_model("llama")
        change(model)
        with pytest.raises(
            UnsupportedError, match=rf"own loss is [\d.]+ with {words}, although the mean"
        ):
            Step(model, SCHEDULE)
    model = make_model("llama")
    model.loss_type = "ForSequenceClassification"
    with pytest.raises(
        UnsupportedError, match=r"own loss fails with its loss_function \(TypeError"
    ):
        Step(model, SCHEDULE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accelerate_s_autocast_is_refused_where_it_changes_results(dtype: torch.dtype) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_model("llama", dtype=dtype)
    expected = run_step(model, SCHEDULE, DATA)
    state = accelerate.state.AcceleratorState
    state._reset_state(reset_partial_state=True)  # there is one in a process
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    state._reset_state(reset_partial_state=True)
    if dtype is torch.float32:
        with pytest.raises(
            UnsupportedError, match=r"mixed precision load the model .*torch\.bfloat16"
        ):
            Step(model, SCHEDULE)
    else:
        assert torch.equal(run_step(model, SCHEDULE, DATA).loss, expected.loss)


def test_weights_that_hooks_bring_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_model("llama")
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(
        UnsupportedError, match=r"all weights on one device, but found .* on meta; load the"
    ):
        Step(model, SCHEDULE)


def test_layers_that_are_held_elsewhere_are_named() -> None:
    model = make_model("llama")
    kept = model.model.layers

    class Holding(type(model.model)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            own = self.__dict__["_modules"]
            self.__dict__["_modules"] = {**own, "layers": kept}
            try:
                return super().forward(*arguments, **keywords)
            finally:
                self.__dict__["_modules"] = own

    model.model.__class__ = Holding
    with pytest.raises(
        UnsupportedError, match="something outside the decoder's list of layers still holds"
    ):
        Step(model, SCHEDULE)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    where = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "wrapper", [torch.compile, lambda model: torch.compile(DistributedDataParallel(model))]
)
@pytest.mark.usefixtures("one_rank")
def test_wrappers_are_taken_off(wrapper: Any) -> None:
    model = make_model("llama")
    expected = run_oracle(model, DATA)
    assert_close(run_step(model, Step(wrapper(model), SCHEDULE), DATA), expected)


@pytest.mark.usefixtures("one_rank")
def test_one_that_averages_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(make_model("llama"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    with pytest.raises(UnsupportedError, match="would average gradients over 2 ranks"):
        Step(model, SCHEDULE)
