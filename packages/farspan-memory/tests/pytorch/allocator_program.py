"""What a user's program is to an allocator: a small model trained for a few steps, as a process.

    python allocator_program.py SETTINGS.json

torch's CPU memory comes from the native library, through the entry points that PyTorch calls on a
GPU, over memory that is really mapped at several addresses. Prints one JSON object: each scenario's
losses and a digest of its weights, as bits, with torch's own allocator and with ours; and what the
allocator counted.
"""

import ctypes
import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from farspan_memory.allocator import Session
from farspan_memory.native import AllocatorOptions, Backend, Broken, PlanRow, Policy
from farspan_memory.pytorch import NativeMemory, out_of_memory_raiser
from farspan_memory.replay import ReplayPlan

STEPS = 5
VOCAB = 256
LONGEST = 160  # a float32 activation is 160 KiB: three chunks
CHUNK = 64 << 10
SMALL = 4 << 10  # what is smaller shares chunks
DEVICE = 0


@dataclass(frozen=True)
class Scenario:
    """How long the sequences of successive steps are, and whether layers are recomputed."""

    lengths: tuple[int, ...]
    checkpointing: bool = False


SCENARIOS = {
    "fixed": Scenario((LONGEST,) * STEPS),
    "varying": Scenario((LONGEST, 96, 144, 72, 150)),
    "checkpointing": Scenario((LONGEST, LONGEST, 96, 120, 96), checkpointing=True),
}


def model() -> LlamaForCausalLM:
    """Two layers; most of its tensors are larger than a chunk."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(scenario: Scenario, begin: Callable[[], None]) -> Iterator[str]:
    """Each step's loss and at the end the weights, as bits. `begin` is called before each step."""
    trained = model()
    trained.train()
    if scenario.checkpointing:
        trained.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(11)
    for length in scenario.lengths:
        begin()
        ids = torch.randint(0, VOCAB, (2, length), generator=data)
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item().hex()
    begin()
    digest = hashlib.sha256()
    for parameter in trained.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    yield digest.hexdigest()


def prepare(settings: dict[str, Any]) -> Session:
    """The allocator as the settings want it."""
    policy = Policy.SHUFFLE | Policy.STEAL | Policy.MERGE
    options = AllocatorOptions(
        Backend.POSIX, chunk=CHUNK, small=SMALL, capacity=settings["capacity"], policy=policy
    )
    memory = NativeMemory(settings["mode"], options, Path(settings["library"]))
    given, plan = settings.get("plan"), None
    if given is not None:
        made = tuple(PlanRow(*row) for row in given["rows"])
        plan = ReplayPlan(made, given["arena"], given["lower_bound"])
    if settings.get("companion"):
        raiser = out_of_memory_raiser(Path(settings["companion"]))
        assert raiser.address is not None, raiser.reason
        memory.raise_out_of_memory_by(raiser.address)
    return Session(memory, plan)


def switch(shim: ctypes.CDLL, session: Session) -> None:
    """torch's CPU tensors come from the native library from here on."""
    entries = session.memory.entries()
    shim.farspan_cpu_install(ctypes.c_void_p(entries.allocate), ctypes.c_void_p(entries.free))


def compare(settings: dict[str, Any], shim: ctypes.CDLL, session: Session) -> dict[str, Any]:
    """All scenarios with torch's own allocator, unless what that gives is known, and with ours."""
    known, names = settings.get("expected", {}), settings["scenarios"]
    expected = {n: known.get(n) or list(train(SCENARIOS[n], lambda: None)) for n in names}
    switch(shim, session)
    found, counted, broken = {}, {}, ""
    for name in settings["scenarios"]:
        found[name] = list(train(SCENARIOS[name], lambda: session.begin_iteration(DEVICE)))
        gc.collect()
        if settings.get("forget"):
            session.forget(DEVICE)
        try:
            session.memory.of(DEVICE).check()
        except Broken as error:
            broken = str(error)
        counted[name] = asdict(session.memory.statistics(DEVICE))
    shim.farspan_cpu_uninstall()
    return {"expected": expected, "found": found, "statistics": counted, "broken": broken}


def exhaust(shim: ctypes.CDLL, session: Session) -> dict[str, Any]:
    """More than the capacity: what is raised, and whether there is memory again afterwards."""
    switch(shim, session)
    kept, caught = [], None
    try:
        while True:
            kept.append(torch.ones(CHUNK))
    except RuntimeError as error:
        caught = [type(error) is torch.OutOfMemoryError, str(error)]
    count = len(kept)
    kept.clear()
    again = float(torch.ones(CHUNK * (count - 1)).sum())  # the last chunks are for the sum
    shim.farspan_cpu_uninstall()
    return {"caught": caught, "count": count, "again": again}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    shim, session = ctypes.CDLL(settings["shim"]), prepare(settings)
    if settings.get("exhaust"):
        print(json.dumps(exhaust(shim, session)))
        return
    result = compare(settings, shim, session)
    if settings["mode"] == "record":
        result["events"] = [list(event) for event in session.memory.of(DEVICE).events()]
    followed = session.plans.get(DEVICE)
    result["planned"] = followed.planned if followed else None
    print(json.dumps(result))


if __name__ == "__main__":
    main()
