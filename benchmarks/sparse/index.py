"""An index of a model for `selector: index`: principal dims of its queries and keys, and steps of
learning by its own choice on English text.

    python -m benchmarks.sparse.index MODEL INDEX --steps 16
    python -m benchmarks.sparse.evidence --model MODEL --index INDEX

On a CPU, in float32. The text is docstrings of Python's library, none of which the evidence reads.
The model stays as it is.
"""

import argparse
import ast
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from farspan import Schedule, Sparse, Step
from farspan.sparse.index import principal_index

CHUNK = 256
TOKENS = 1024  # of a text
CONTEXT = 8192  # that SmolLM2 reads at most


def docstrings() -> str:
    """Those of the library's modules, in the order of their names."""
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.append(ast.get_docstring(node) or "")
    return "\n\n".join(filter(None, found))


def passages(tokenizer: Any, tokens: int = TOKENS) -> Iterator[Tensor]:
    """input_ids [1, tokens] of docstrings, without an end; the same each time."""
    text = list(tokenizer(docstrings(), verbose=False).input_ids)
    drawn = random.Random(0)
    while True:
        start = drawn.randrange(len(text) - tokens)
        yield torch.tensor([text[start : start + tokens]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of SmolLM2, by examples/model.py")
    parser.add_argument("index", type=Path, help="the folder to write")
    parser.add_argument("--dim", type=int, default=Sparse().index_dim)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a text")
    parser.add_argument("--steps", type=int, default=0, help="of learning, a text each")
    parser.add_argument("--page", type=int, default=16, help="tokens of a page to learn by")
    parser.add_argument("--budget", type=int, default=512, help="tokens of chosen pages")
    parser.add_argument("--lr", type=float, default=3e-4, help="of Adam, falling to 0")
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    text = passages(AutoTokenizer.from_pretrained(given.model), given.tokens)
    began = time.perf_counter()
    index = principal_index(model, next(text), given.dim, CONTEXT).learning()
    pages = Sparse(given.page, given.budget, 256, selector="index", index_dim=given.dim)
    step = Step(model.requires_grad_(False), Schedule(chunk=CHUNK, sparse=pages), selector=index)
    optimizer = torch.optim.Adam(index.parameters(), given.lr)
    for number in range(given.steps):
        optimizer.param_groups[0]["lr"] = given.lr * (1 - number / given.steps)
        ids = next(text)
        loss = float(step.evaluate(ids, ids))
        optimizer.step()
        optimizer.zero_grad()
        row = {"step": number + 1, "loss": loss, "seconds": time.perf_counter() - began}
        print(json.dumps(row), flush=True)
    index.save(given.index)


if __name__ == "__main__":
    main()
