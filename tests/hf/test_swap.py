"""A user's model is itself after every step, error and interrupt, whatever was put into it."""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import farspan
from farspan.distributed import fsdp
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.hf.attention_interface import config_field
from farspan.hf.edits import look
from farspan.hf.load import add_adapters
from farspan.hf.swap import forwards, put_in, replacements, shell_of
from farspan.posttrain.ranks import trained_as
from farspan.spec import Schedule, Tier
from tests.engine.checks import assert_same_bits, draw, run_step
from tests.grids import exhaustive
from tests.zoo import make_model

SOURCE = Path(farspan.__file__).parent
DATA = draw(24, batch=2, documents=2)
PLAIN = Schedule(chunk=8, groups=2, activation_save_fraction=0.5, loss_chunk_size=5)
TABLES = {"_modules", "_parameters", "_buffers", "__dict__", "__setitem__"}


# -- everything that a model is ------------------------------------------------------------------


def state_of(model: nn.Module, *, values: bool = True) -> dict[str, Any]:
    """Everything that a step may put something into, by identity; weights and buffers by place."""
    found: dict[str, Any] = {"names": [name for name, _ in model.named_modules()]}
    for path, module in model.named_modules():
        tables = {name: x for name, x in vars(module).items() if isinstance(x, dict)}
        found[path] = (
            id(module),
            type(module),
            {name: id(x) for name, x in vars(module).items() if not isinstance(x, bool)},
            {name: [(key, id(x)) for key, x in x.items()] for name, x in tables.items()},
            module.training,
            config_of(module),
        )
    for name, p in model.named_parameters(remove_duplicate=False):
        flags = p.requires_grad, p.grad_dtype, p.is_leaf, p.dtype, p.device, values and p._version
        found[f"parameter {name}"] = *flags, p.data_ptr(), [*(p._backward_hooks or {}).values()]
    for name, b in model.named_buffers():
        found[f"buffer {name}"] = b.device, b.data_ptr(), b._version
    return found


def config_of(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    return {n: repr(x) for n, x in vars(config).items()} if config is not None else {}


@contextmanager
def untouched(model: nn.Module, *, values: bool = True) -> Iterator[None]:
    before, seen = state_of(model, values=values), look(model)
    yield
    after = state_of(model, values=values)
    assert [name for name in {**before, **after} if before.get(name) != after.get(name)] == []
    assert look(model) == seen


# -- models and schedules by which all ways to put something in are taken -------------------------


def adapted() -> Any:
    model = make_model("qwen2", torch.float32)
    add_adapters(model, rank=2, alpha=4, dropout=0.25)
    return model


def hooked() -> Any:
    model: Any = make_model("llama", torch.float32)
    model.lm_head.weight.register_hook(lambda g: g)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    return model.to(torch.bfloat16)


MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: make_model("gemma3_text", torch.float32),
    "adapters that drop": adapted,
    "hooks and dtypes of gradients": hooked,
    "long rope": lambda: make_model("phi3", torch.float32),
    "recurrent": lambda: make_model("lfm2", torch.float32),
}
SCHEDULES = {
    "plain": PLAIN,
    "tiles": replace(PLAIN, mlp_chunk_size=3),
    "streamed": replace(PLAIN, weights=Tier.HOST),
}
WAYS = [
    *(("plain", name) for name in SCHEDULES),
    *(("adapters that drop", name) for name in ("streamed", "tiles")),
    ("hooks and dtypes of gradients", "streamed"),
    ("long rope", "plain"),
    ("recurrent", "streamed"),
]


def values_and_backward(step: Step) -> None:
    step.logprobs(*DATA).sum().backward()


CALLS: dict[str, Callable[[Step], object]] = {
    "step": lambda step: step(*DATA),
    "evaluate": lambda step: step.evaluate(*DATA),
    "values": values_and_backward,
}


class Interrupt:
    """Interrupts farspan at its call of a function that has a number."""

    def __init__(self, number: int = sys.maxsize) -> None:
        self.number, self.calls = number, 0

    def __enter__(self) -> "Interrupt":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            self.calls += 1
            if self.calls == self.number:
                raise KeyboardInterrupt


# An interrupt may hit a generator as it is closed, where nobody can catch it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("way", "interrupts"),
    [(7, 2), *(exhaustive(way, 6) for way in range(8))],
)
def test_after_a_step_an_error_and_an_interrupt(way: int, interrupts: int) -> None:
    """Interrupted in each way elsewhere."""
    model, schedule = WAYS[way]
    user = MODELS[model]()
    step = Step(user, SCHEDULES[schedule], seed=3, neftune_alpha=5.0 if "drop" in model else None)
    first = run_step(user, step, DATA)
    for call in CALLS.values():
        with untouched(user), Interrupt() as counted:
            call(step)
        for number in places(counted.calls, interrupts, way / len(WAYS)):
            with untouched(user), Interrupt(number), suppress(KeyboardInterrupt):
                call(step)
        step.progress = stop
        with untouched(user), pytest.raises(RuntimeError, match="stop"):
            call(step)
        step.progress = None
    if "drop" not in model:  # each call draws anew
        assert_same_bits(run_step(user, step, DATA), first)


def places(calls: int, count: int, shift: float) -> list[int]:
    """Numbers of calls, at equal distances, the first of them by a share of a distance late."""
    return [1 + int(calls * (place + shift) / count) for place in range(count)]


def stop(done: Progress) -> None:
    if done.cells_done == done.cells - 2:
        raise RuntimeError("stop")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("model", "schedule", "shift"),
    [
        ("plain", "tiles", 0.0),
        exhaustive("adapters that drop", "plain", 0.3),
        ("recurrent", "plain", 0.6),
    ],
)
def test_while_a_step_is_prepared(model: str, schedule: str, shift: float) -> None:
    """Probes, descriptions, fused layers and tiles look at the model in pieces."""
    user = MODELS[model]()
    with untouched(user), Interrupt() as counted:
        Step(user, SCHEDULES[schedule])
    for number in places(counted.calls, 3, shift):
        with untouched(user), Interrupt(number), suppress(KeyboardInterrupt):
            Step(user, SCHEDULES[schedule])


# -- contexts that are not a step's -----------------------------------------------------------


CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "a field of its configurations": lambda m: config_field(m, "_attn_implementation", "farspan"),
    "one that was not there": lambda m: config_field(m, "not_there", "x"),
    "forwards": lambda m: put_in(forwards(dict.fromkeys(m.modules(), print))),
    "weights": lambda m: put_in(
        replacements(m, {p: nn.Parameter(torch.zeros(1)) for p in m.parameters()})
    ),
    "training of adapters": lambda m: trained_as(dict.fromkeys(m.parameters(), False)),
    "the same part twice": lambda m: put_in([(vars(m), "forward", x) for x in (print, repr)]),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_context_restores(name: str, error: type[BaseException] | None) -> None:
    user = make_model("llama", torch.float32, tie_word_embeddings=True)
    before, expected = state_of(user), () if error is None else (error,)
    with untouched(user), suppress(*expected), CONTEXTS[name](user):
        assert state_of(user) != before
        if error is not None:
            raise error


def test_what_fails_half_way_is_taken_out() -> None:
    class Refusing(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            if value == "refused":
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    table, other = {"a": 1}, Refusing(b=2)
    parts = [(table, "a", 3), (table, "c", 4), (other, "b", "refused")]
    with pytest.raises(KeyboardInterrupt), put_in(parts):
        raise AssertionError("nothing runs")
    assert (table, other.b) == ({"a": 1}, 2)


def test_an_interrupted_gather_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit counts as gathered until all of its shards are back."""
    unit = fsdp._FsdpUnit(peers=None, mesh=None)  # type: ignore[arg-type]
    monkeypatch.setattr(fsdp, "put", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    for gathered in (True, False):
        with pytest.raises(KeyboardInterrupt):
            unit.put(gathered)
        assert unit.gathered


# -- shells ------------------------------------------------------------------------------------


def test_a_shell_has_other_parts_and_shares_the_rest() -> None:
    model = make_model("llama", torch.float32).model.layers[0].mlp
    with untouched(model):
        shell = shell_of(
            model,
            {"act_fn": nn.ReLU()},
            buffers={"extra": torch.zeros(1)},
            attributes={"note": 1},
            forward=lambda self, x: self.note + x,
        )
        assert (int(shell(torch.tensor(2))), shell.up_proj) == (3, model.up_proj)
        assert isinstance(shell.act_fn, nn.ReLU)
        assert list(dict(shell.named_buffers())) == ["extra"]
    with put_in([(model._parameters, "late", nn.Parameter(torch.ones(1)))]):
        assert "late" in shell._parameters, "it has what is put into the model later"
    model.forward = partial(type(model).forward, model)
    assert "forward" not in vars(shell_of(model))
    assert vars(shell_of(model, own_forward=True))["forward"] is model.forward


# -- one place ---------------------------------------------------------------------------------


def targets_of(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=found) | ast.Delete(targets=found):
            return found
        case ast.AugAssign(target=found):
            return [found]
    return []


def writes_to_tables(text: str) -> list[int]:
    """Lines that write into a table of a module, replace its forward, or set any attribute."""
    found = []
    for node in ast.walk(ast.parse(text)):
        for target in targets_of(node):
            match target:
                case ast.Subscript(value=ast.Attribute(value=owner, attr=name)):
                    into = name in TABLES
                case ast.Attribute(value=owner, attr=name):
                    into = name in (*TABLES, "forward")
                case _:
                    continue
            if into and ast.unparse(owner) != "self":
                found.append(target.lineno)
        match node:
            case ast.Call(
                lineno=line,
                func=ast.Name(id="setattr") | ast.Attribute(attr="__setattr__"),
                args=[owner, *_],
            ) if ast.unparse(owner) != "self":
                found.append(line)
    return found


# Sets attributes of other things: a package, a message, a step's parts, a Trainer's arguments.
OTHERS = {"lazy.py", "distributed/messages.py", "engine/step.py", "posttrain/trainer.py"}


def test_nothing_else_writes_into_a_model() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if writes_to_tables(path.read_text("utf-8"))
    }
    assert found - OTHERS == {"hf/swap.py"}
