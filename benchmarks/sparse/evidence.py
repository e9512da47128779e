"""Does the choice of pages find what matters? A needle in noise, and a real model that was never
trained sparsely.

    python -m benchmarks.sparse.evidence --model MODEL --out benchmarks/results/sparse_evidence.json

On a CPU, in float32. Without `--model` only the needle. `--seeds` says how much is measured: a run
of 4,096 tokens takes about half a minute on one core, dense or sparse. `mean` is measured with the
first seeds only. The index of `index` has the principal dimensions of another text, docstrings of
Python's library.

- needle: 1,024 pages of 128 random keys; one key of one page holds 90% of the dense attention of
  some tokens of a page of queries, with 7 heads each. How often is its page among the 64 chosen?
- pass key: five digits in English text, between an eighth and five eighths of the way, asked for
  at the end. Mean negative log-likelihood of their tokens; all layers and tokens are sparse.
- text: the same of the last quarter of text.
"""

import argparse
import ast
import json
import math
import os
import pydoc_data.topics
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from farspan import Schedule, Sparse, Step
from farspan.engine.loss import IGNORED
from farspan.engine.microbench import describe_machine
from farspan.sparse.attend import FarCall, compare
from farspan.sparse.gathered import Gathered, PlainPages
from farspan.sparse.index import principal_index
from farspan.sparse.pages import Candidates, TopK, mean_keys
from farspan.spec import INDEX, MEAN, SELECTORS

Row = dict[str, Any]
DENSE = "dense"
CHUNK = 256
# At most 15% of the prefix of the answer at 4,096 tokens, and 10% at 8,192, in whole pages.
BUDGETS = {4096: 512, 8192: 768}
RECENT = 512
CONTROLS = 2  # seeds of `mean`, which finds nothing
ALL = *SELECTORS, INDEX
TEXT = 1024  # tokens of the text that an index is made of
CONTEXT = 8192  # tokens that SmolLM2 reads at most


def sparse_of(tokens: int, selector: str) -> Sparse:
    page = Sparse().page
    budget = BUDGETS[tokens] // page * page
    query_page = page if selector == MEAN else Sparse().query_page
    return Sparse(page, budget, recent=RECENT, selector=selector, query_page=query_page)


# -- a needle in noise --------------------------------------------------------------------------

NEEDLE_PAGES, CHOSEN, HEADS, DIM = 1024, 64, 7, 128
SHARE = 0.9  # of a query's attention


def needle(sparse: Sparse, needed: int, generator: torch.Generator) -> bool:
    """Is the needle's page chosen, where so many tokens of a page of queries need it?"""
    scale, queries = DIM**-0.5, sparse.query_tokens
    k = torch.randn(NEEDLE_PAGES * sparse.page, DIM, generator=generator)
    q = torch.randn(HEADS, queries, DIM, generator=generator)
    direction = torch.nn.functional.normalize(torch.randn(DIM, generator=generator), dim=0)
    at = int(torch.randint(len(k), (), generator=generator))
    seeks = q[:, :needed]
    others = (seeks @ k.mT * scale).logsumexp(-1)
    score = others + math.log(SHARE / (1 - SHARE))  # of the needle: both lengths grow alike
    length = (score.mean() / scale).sqrt()
    k[at] = length * direction
    along = (seeks @ direction).unsqueeze(-1)
    seeks += (score.unsqueeze(-1) / (scale * length) - along) * direction
    representatives = mean_keys(k[:, None, None], sparse.mean_tokens).permute(1, 2, 0, 3)
    call = FarCall(scale, sparse.page, None, sparse.query_tokens)
    of = q[None], representatives, Candidates(range(NEEDLE_PAGES))
    choice = TopK(CHOSEN)(*compare(Gathered(PlainPages()), call, sparse, *of))
    return bool((choice == at // sparse.page).any())


def needles(trials: int) -> Iterator[Row]:
    for selector in SELECTORS:
        sparse = Sparse(selector=selector)
        for needed in (1, 8, sparse.query_tokens):
            generator = torch.Generator().manual_seed(needed)
            found = sum(needle(sparse, needed, generator) for _ in range(trials))
            row = {"selector": selector, "needed_by": needed, "recall": found / trials}
            print(json.dumps(row), flush=True)
            yield row | {"trials": trials}


# -- a real model -------------------------------------------------------------------------------


def docstrings() -> str:
    """Those of Python's library, in the order of its modules' names."""
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.append(ast.get_docstring(node) or "")
    return "\n\n".join(filter(None, found))


class Reader:
    """A model, and English text in its tokens."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        began = time.perf_counter()
        other = self.tokens(docstrings())
        start = random.Random(0).randrange(len(other) - TEXT)
        text = torch.tensor([other[start : start + TEXT]])
        self.index = principal_index(self.model, text, Sparse().index_dim, CONTEXT)
        self.about = {"dim": self.index.dim, "seconds": round(time.perf_counter() - began, 1)}
        topics = pydoc_data.topics.topics
        self.text = self.tokens("\n\n".join(topics[name] for name in sorted(topics)))

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, verbose=False).input_ids)

    def pass_key(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """input_ids and labels [1, tokens]; all but the answer's are ignored."""
        drawn = random.Random(seed)
        key = "".join(drawn.choice("123456789") for _ in range(5))
        fact = f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
        question = self.tokens("\n\nWhat is the pass key? The pass key is")
        said, answer = self.tokens(fact), self.tokens(f" {key}")
        rest = tokens - len(said) - len(question) - len(answer)
        start = drawn.randrange(len(self.text) - rest)
        at = drawn.randrange(tokens // 8, tokens * 5 // 8)
        body = self.text[start : start + rest]
        ids = torch.tensor([[*body[:at], *said, *body[at:], *question, *answer]])
        labels = ids.clone()
        labels[:, : -len(answer)] = IGNORED
        return ids, labels

    def passage(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Text, of which the last quarter is counted."""
        start = random.Random(seed).randrange(len(self.text) - tokens)
        ids = torch.tensor([self.text[start : start + tokens]])
        labels = ids.clone()
        labels[:, : -(tokens // 4)] = IGNORED
        return ids, labels

    def loss(self, selector: str, data: tuple[Tensor, Tensor]) -> float:
        ids, labels = data
        sparse = None if selector == DENSE else sparse_of(ids.shape[1], selector)
        index = self.index if selector == INDEX else None
        step = Step(self.model, Schedule(chunk=CHUNK, sparse=sparse), selector=index)
        return float(step.evaluate(ids, labels))

    def compare(self, what: str, tokens: int, seeds: int) -> Iterator[Row]:
        draw = self.pass_key if what == "pass key" else self.passage
        for seed in range(seeds):
            data = draw(tokens, seed)
            others = [name for name in ALL if seed < CONTROLS or name != MEAN]
            for selector in (DENSE, *others):
                began = time.perf_counter()
                row: Row = {"what": what, "tokens": tokens, "seed": seed, "attention": selector}
                row["loss"] = round(self.loss(selector, data), 4)
                row["seconds"] = round(time.perf_counter() - began, 1)
                print(json.dumps(row), flush=True)
                yield row


def gaps(rows: list[Row]) -> list[Row]:
    """Mean losses above dense attention's of the same data."""
    dense = {key(row): row["loss"] for row in rows if row["attention"] == DENSE}
    found = []
    for what, tokens, selector in sorted({(*key(row)[:2], row["attention"]) for row in rows}):
        own = [row for row in rows if (*key(row)[:2], row["attention"]) == (what, tokens, selector)]
        above = sum(row["loss"] - dense[key(row)] for row in own) / len(own)
        name = {"what": what, "tokens": tokens, "attention": selector, "seeds": len(own)}
        mean = sum(row["loss"] for row in own) / len(own)
        found.append(name | {"loss": round(mean, 4), "above_dense": round(above, 4)})
    return found


def key(row: Row) -> tuple[str, int, int]:
    """The data of a row."""
    return row["what"], row["tokens"], row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2, by examples/model.py")
    parser.add_argument("--trials", type=int, default=20, help="needles of a kind")
    parser.add_argument("--seeds", type=int, nargs=2, default=(16, 2), help="by length")
    parser.add_argument("--texts", type=int, default=4, help="passages of text")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record: Row = {"benchmark": "sparse_evidence", "machine": describe_machine()}
    record |= {"dtype": "float32", "chunk": CHUNK, "needle": list(needles(given.trials))}
    if given.model is not None:
        reader = Reader(given.model)
        record["sparse"] = {tokens: asdict(sparse_of(tokens, SELECTORS[0])) for tokens in BUDGETS}
        record["index"] = reader.about
        rows = list(reader.compare("text", 4096, given.texts))
        for tokens, seeds in zip(BUDGETS, given.seeds, strict=True):
            rows += reader.compare("pass key", tokens, seeds)
        record |= {"rows": rows, "gaps": gaps(rows)}
        print(json.dumps(record["gaps"]))
    if given.out is not None:
        given.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
