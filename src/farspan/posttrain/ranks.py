"""A transformers Trainer on several ranks. Ranks that share a sequence act as one process of the
Trainer, so that each replica of the model counts as one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import gradient_dtype
from farspan.engine.parallelize import ShardedModel
from farspan.hf.swap import put_in
from farspan.lazy import load
from farspan.program.layout import Layout
from farspan.spec import UnsupportedError

# TRL trainers that gather from all processes themselves and would count a sequence repeatedly.
_GATHER = ("GRPOTrainer", "RLOOTrainer")


def context_of(accelerator: Any, layout: Layout | None, trainer: type) -> ParallelContext | None:
    """Return the communication context of a Trainer's processes, or None for one process. Raises
    UnsupportedError if `layout` does not fit their number or this class of Trainer."""
    processes = accelerator.num_processes
    if layout is not None and not isinstance(layout, Layout):
        raise UnsupportedError(
            f"layout: expected a farspan.Layout, got {layout!r}; write layout=farspan.Layout("
            f"ulysses={processes})"
        )
    if processes == 1 and (layout is None or layout.devices() == 1):
        return None
    if layout is None:
        raise UnsupportedError(
            f"layout: {processes} processes were started; choose how they share a step, such as "
            f"layout=farspan.Layout(ulysses={processes}), or data={processes} for replicas"
        )
    if layout.devices() != processes:
        raise UnsupportedError(
            f"layout: {layout.devices()} devices, but {processes} process(es) were started; start "
            f"as many processes: torchrun --nproc-per-node {layout.devices()} script.py"
        )
    if layout.data < processes and any(base.__name__ in _GATHER for base in trainer.__mro__):
        raise UnsupportedError(
            f"layout: {trainer.__name__} generates in every process by itself; use "
            f"farspan.Layout(data={processes}), or another trainer"
        )
    if layout.tensor > 1:
        raise UnsupportedError(
            "layout: tensor cuts weights into slices, which a Trainer would save as if they were "
            "whole; use ulysses, or `torchrun -m farspan train`"
        )
    if layout.cuts_weights() and layout.pipeline > 1:
        raise UnsupportedError(
            "layout: with pipeline a Trainer's weights stay whole on every rank; add fsdp=False, "
            "or use `torchrun -m farspan train`"
        )
    return ParallelContext(layout, accelerator.device)


def share(accelerator: Any, ranks: ParallelContext) -> None:
    """Make the accelerator count replicas, not ranks, when it distributes, gathers and averages."""
    layout, number = ranks.layout, ranks.rank.along["data"]
    every = range(layout.devices())
    along = [type(ranks.rank)(layout, n).along for n in every]
    first = [n for n in every if not any(v for axis, v in along[n].items() if axis != "data")]
    base: Any = type(accelerator)

    class Replicas(base):
        """Accelerator whose number of processes is the number of replicas."""

        @property
        def num_processes(self) -> int:
            return layout.data

        @property
        def process_index(self) -> int:
            return number

        def gather(self, tensor: Any) -> Any:
            """Gather the tensors of each replica's first rank, in the replicas' order."""

            def chosen(gathered: Tensor) -> Tensor:
                return gathered.unflatten(0, (layout.devices(), -1))[first].flatten(0, 1)

            apply = load("accelerate.utils", "recursively_apply")  # accelerate is optional
            return apply(chosen, super().gather(tensor))

        def prepare_model(self, model: nn.Module, *args: Any, **keywords: Any) -> Any:
            """Return the model without DDP: a farspan step sums gradients itself."""
            return super().prepare_model(model, *args, **keywords | {"evaluation_mode": True})

        def backward(self, loss: Tensor, **keywords: Any) -> None:
            """Run backward on loss / replicas: a farspan step sums the replicas' gradients."""
            super().backward(loss / layout.data, **keywords)

    accelerator.__class__ = Replicas


def complete_gradients(model: nn.Module, ranks: ParallelContext) -> None:
    """Give every rank of a pipeline the gradients of all layers, not only its own stage's."""
    peers = ranks.among("pipeline")
    if peers.size == 1:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    held = torch.tensor([int(p.grad is not None) for p in trained], device=ranks.device)
    for parameter, holders in zip(trained, peers.sum(held).tolist(), strict=True):
        if holders not in (0, peers.size):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            peers.sum(parameter.grad)


@contextmanager
def trained_as(flags: dict[nn.Parameter, bool]) -> Iterator[None]:
    """Set each parameter's `requires_grad` to its value in `flags` inside the block: peft sets it
    to False for adapters while it switches them off."""
    with put_in((p, "requires_grad", is_trained) for p, is_trained in flags.items()):
        yield


def whole_state(model: nn.Module, sharded: ShardedModel) -> dict[str, Tensor]:
    """Return the model's state dict in main memory, unsharded. All ranks call this."""
    own = sharded.sharded.parameters()
    wholes = {id(own[name]): whole.cpu().clone() for name, whole in sharded.sharded.wholes()}
    names = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: wholes[id(names[name])] if id(names.get(name)) in wholes else value
        for name, value in model.state_dict().items()
    }


def cut_what_is_loaded(model: nn.Module) -> None:
    """Make a sharded model's `load_state_dict` keep this rank's part of unsharded weights."""

    def cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state_dict:
                state_dict[prefix + name] = _like(state_dict[prefix + name], parameter)

    model.register_load_state_dict_pre_hook(cut)


def keep_states_whole(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's `state_dict`, which all ranks must call, return unsharded tensors, and
    make its `load_state_dict` accept them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def gathered(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            number: {key: _whole(value) for key, value in state.items()}
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    def cut(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            number: {key: _like(value, parameters[number]) for key, value in state.items()}
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    optimizer.register_state_dict_post_hook(gathered)
    optimizer.register_load_state_dict_pre_hook(cut)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
