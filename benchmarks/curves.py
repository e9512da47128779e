"""Loss curves of every strategy and of plain autograd over a hundred steps (MEMO figure 11d).

    python benchmarks/curves.py --out FILE

Every run starts from the same weights and sees the same documents, the Python standard library's
own sources as bytes. The reference is the model's own forward on the whole sequence with dense
attention, and `loss.backward()`.
"""

import argparse
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from farspan import Step, strategy
from farspan.engine.microbench import describe_machine
from farspan.engine.reference import reference_loss
from farspan.program.strategies import STRATEGIES

STEPS = 100
TOKENS = 1000  # no multiple of any chunk
LAYERS = 4
END = 256  # of a document

StepFunction = Callable[[Tensor, Tensor], float]


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).train()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """input_ids and document_ids, [1, TOKENS] each: sources of the standard library, packed."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    # A thousand bytes of a file at most, so that every sequence packs several documents.
    documents = [[*path.read_bytes()[2000:2400], END] for path in sources]
    flat = [token for document in documents for token in document]
    ids = [index for index, document in enumerate(documents) for _ in document]
    for step in range(STEPS):
        start = (step * TOKENS) % (len(flat) - TOKENS)
        span = slice(start, start + TOKENS)
        yield torch.tensor([flat[span]]), torch.tensor([ids[span]])


def plain(model: nn.Module) -> StepFunction:
    def step(ids: Tensor, documents: Tensor) -> float:
        loss = reference_loss(model, ids, ids, documents)
        loss.backward()
        return float(loss.detach())

    return step


def by_strategy(name: str) -> Callable[[nn.Module], StepFunction]:
    def make(model: nn.Module) -> StepFunction:
        run = Step(model, strategy(name, LAYERS, TOKENS))
        return lambda ids, documents: float(run(ids, ids, documents))

    return make


def curve(make_step: Callable[[nn.Module], StepFunction]) -> list[float]:
    model = make_model()
    step = make_step(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids, documents in batches():
        optimizer.zero_grad(set_to_none=True)
        losses.append(step(ids, documents))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="write the record to this file")
    given = parser.parse_args()
    makers: dict[str, Callable[[nn.Module], StepFunction]] = {"autograd": plain}
    makers |= {name: by_strategy(name) for name in STRATEGIES}
    curves: dict[str, list[float]] = {}
    for name, make in makers.items():
        curves[name] = curve(make)
        far = max(abs(a - b) for a, b in zip(curves[name], curves["autograd"], strict=True))
        print(f"{name:12} first {curves[name][0]:.4f} last {curves[name][-1]:.4f} apart {far:.1e}")
    record: dict[str, Any] = {
        "benchmark": "curves",
        "machine": describe_machine(),
        "dtype": "float32",
        "tokens": TOKENS,
        "steps": STEPS,
        "loss": curves,
    }
    given.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
