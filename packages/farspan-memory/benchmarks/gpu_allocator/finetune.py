"""A child: all weights of a transformer trained on sequences of varying lengths, layers recomputed,
under a limit of memory.

    python -m benchmarks.gpu_allocator.finetune SETTINGS

A row for each step, so that it is seen how far a run came that was stopped, and one at its end.
Kernels are deterministic: runs that complete must have the same losses, whatever their addresses.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import farspan_memory as memory
from benchmarks.children import Clock, Row, add_row, settings_of
from benchmarks.gpu_allocator.served import Contender, limit_pytorch, out_of_memory
from benchmarks.gpu_allocator.work import FULL, TINY, Work


def model_of(work: Work, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Of random weights, its layers recomputed."""
    config = LlamaConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        max_position_embeddings=work.longest,
        use_cache=False,
    )
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    made.train()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def be_deterministic(strict: bool) -> None:
    """Flash attention is the one kernel of scaled_dot_product_attention that can be."""
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def limit_memory(contender: Contender, device: str, limit: int) -> None:
    """At most `limit` bytes are reserved, 0 for all; before anything of CUDA. Raises
    UnsupportedError."""
    if contender.mode:
        memory.install(contender.mode, chunk=contender.chunk, capacity=limit)
    elif device == "cuda" and limit:
        limit_pytorch(limit)


def train(work: Work, device: str, contender: Contender, settings: Mapping[str, Any]) -> str:
    """How it ended. A row for each step."""
    clock = Clock.of(settings["seconds"] - settings["start_seconds"])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    done = 0
    try:
        model = model_of(work, device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        data = torch.Generator().manual_seed(11)
        for length in work.lengths():
            if clock.left < 0:
                return "out of time"
            if contender.mode:
                memory.begin_iteration()
            began = time.perf_counter()
            ids = torch.randint(0, work.vocabulary, (1, length), generator=data).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()
            if device == "cuda":
                torch.cuda.synchronize()
            row = {"step": done, "tokens": length, "loss": value}
            add_row(settings, {**row, "seconds": time.perf_counter() - began})
            done += 1
    except Exception as error:
        if not out_of_memory(error):
            raise
        add_row(settings, {"words": str(error)[:300]})
        return "out of memory"
    return "completed"


def counts(device: str, contender: Contender) -> Row:
    """What the allocator counted; nothing on a CPU."""
    if device != "cuda":
        return {}
    found = torch.cuda.memory_stats()
    row: Row = {
        "peak_reserved": found["reserved_bytes.all.peak"],
        "peak_allocated": found["allocated_bytes.all.peak"],
        "retries": found["num_alloc_retries"],
        "device_allocs": found.get("num_device_alloc", 0),
        "device_frees": found.get("num_device_free", 0),
    }
    if contender.mode:
        native = memory.statistics()
        names = ("maps", "unmaps", "stitches", "stitch_frees", "splits", "steals", "event_syncs")
        row |= {name: getattr(native, name) for name in names}
        row["out_of_memory_error"] = getattr(memory.installed(), "out_of_memory", "")
    return row


def main() -> None:
    settings = settings_of(sys.argv)
    device = settings["device"]
    contender = Contender(**settings["contender"])
    if device == "cpu":
        torch.set_num_threads(1)
    limit_memory(contender, device, settings["limit"])
    be_deterministic(settings["strict"])
    work = TINY if settings["tiny"] else FULL
    ended = train(work, device, contender, settings)
    add_row(settings, {"ended": ended, **counts(device, contender)})


if __name__ == "__main__":
    main()
