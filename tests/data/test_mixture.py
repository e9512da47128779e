"""Several sources are mixed by their weights, in an order that only the seed decides."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farspan.data.config import DataConfig, Loss, SourceKind, WeightedSource
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.packing import Mixture
from farspan.data.tokenizers import ByteTokenizer
from farspan.spec import UnsupportedError

CONTEXT = 32


def write(folder: Path, name: str, lines: int, size: int = 20) -> str:
    path = folder / f"{name}.jsonl"
    texts = [f"{name} {number} ".ljust(size - 1, ".") for number in range(lines)]
    text = "".join(json.dumps({"text": t}) + "\n" for t in texts)
    if not path.exists():
        path.write_text(text)
    return str(path)


def source(path: str, weight: float = 1.0, **fields: Any) -> WeightedSource:
    return WeightedSource(source=SourceKind.JSONL, path=path, weight=weight, **fields)


def mixed(folder: Path, *sources: WeightedSource, seed: int = 0, context: int = CONTEXT) -> Corpus:
    config = DataConfig(sources=sources, cache=str(folder / "cache"))
    return open_corpus(config, ByteTokenizer(), context=context, seed=seed, watch=lambda *_: None)


def first_names(corpus: Corpus, count: int) -> list[str]:
    return [corpus.train.batch([i]).names[0][0] for i in range(count)]


def test_one_source_is_what_it_is_without_others(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 9)
    listed = mixed(tmp_path, source(path, held_out=0.2))
    config = DataConfig(
        source=SourceKind.JSONL, path=path, held_out=0.2, cache=str(tmp_path / "cache")
    )
    plain = open_corpus(config, ByteTokenizer(), context=CONTEXT, seed=0, watch=lambda *_: None)
    assert listed.identity == plain.identity
    assert first_names(listed, 20) == first_names(plain, 20)
    # And of several, the first is read in the order in which it is read alone.
    both = mixed(tmp_path, source(path, held_out=0.2), source(write(tmp_path, "b", 9), 0.25))
    own = [name for name in first_names(both, 30) if "/a." in name]
    assert own == first_names(plain, len(own))


def test_a_weight_is_a_share_of_the_tokens(tmp_path: Path) -> None:
    """Documents of 20 of 32 tokens and of 32: as many tokens of each need more sequences of one."""
    a, b = write(tmp_path, "a", 50, size=20), write(tmp_path, "b", 7, size=32)
    c = write(tmp_path, "c", 3, size=32)
    corpus = mixed(tmp_path, source(a, 2), source(b, 1), source(c, 1))
    tokens: Counter[str] = Counter()
    for index in range(4200):
        batch = corpus.train.batch([index])
        tokens[Path(batch.names[0][0]).name[0]] += batch.tokens
    shares = [tokens[name] / tokens.total() for name in "abc"]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=1e-3)
    # Never more than a sequence away from it, wherever one looks.
    seen: Counter[str] = Counter()
    rates = np.array([2 / 20, 1 / 32, 1 / 32]) / (2 / 20 + 2 / 32)
    for index, name in enumerate(first_names(corpus, 300), start=1):
        seen[Path(name).name[0]] += 1
        assert all(abs(seen[n] - index * r) <= 1 for n, r in zip("abc", rates, strict=True))


def test_any_sequence_can_be_asked_for_and_batches_are_rows(tmp_path: Path) -> None:
    sources = [source(write(tmp_path, name, n), n) for name, n in (("a", 5), ("b", 3), ("c", 11))]
    corpus, again = mixed(tmp_path, *sources), mixed(tmp_path, *sources)
    rows = [corpus.train.batch([i]) for i in range(12)]
    batch = again.train.batch(range(11, -1, -1))
    assert batch.input_ids.tolist() == [r.input_ids[0].tolist() for r in reversed(rows)]
    assert batch.labels.tolist() == [r.labels[0].tolist() for r in reversed(rows)]
    assert batch.document_ids.tolist() == [r.document_ids[0].tolist() for r in reversed(rows)]
    assert batch.names == tuple(r.names[0] for r in reversed(rows))
    assert batch.tokens == sum(r.tokens for r in rows)
    assert again.train.batch([10**9]).names == corpus.train.batch([10**9]).names
    assert first_names(mixed(tmp_path, *sources, seed=1), 12) != first_names(corpus, 12)


def test_after_an_epoch_every_source_was_read_whole(tmp_path: Path) -> None:
    a, b = source(write(tmp_path, "a", 8), 3), source(write(tmp_path, "b", 8), 1)
    corpus = mixed(tmp_path, a, b)
    assert isinstance(corpus.train, Mixture)
    epoch = corpus.train.sequences_per_epoch()
    names = first_names(corpus, epoch)
    assert len(set(names)) == 16
    assert len(set(names[:-1])) == 15
    assert corpus.train.epochs() == pytest.approx([24 / 8, 1.0], abs=0.2)
    assert any(
        f"source {a.path} (text): 75.0% of all tokens" in s for s in corpus.describe(CONTEXT)
    )


def test_what_is_held_out_of_each_is_evaluated_once(tmp_path: Path) -> None:
    aside = write(tmp_path, "c", 3)
    corpus = mixed(
        tmp_path,
        source(write(tmp_path, "a", 10), 9, held_out=0.5),
        source(write(tmp_path, "b", 4), held_out_path=aside),
    )
    assert corpus.held_out is not None
    count = corpus.held_out.sequences_per_epoch()
    names = [corpus.held_out.once(i).names[0][0] for i in range(count)]
    assert len(names) == len(set(names)) == 5 + 3
    trained = set(first_names(corpus, 200))
    assert not trained & set(names)
    assert len(trained) == 5 + 4


def test_each_source_has_its_own_form(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"q": "ask", "a": "answer"}\n')
    prompts = source(
        str(tmp_path / "p.jsonl"),
        format="prompt",
        prompt="q",
        completion="a",
    )
    corpus = mixed(tmp_path, source(write(tmp_path, "a", 3)), prompts)
    rows = {r.names[0][0][-9:]: r for r in (corpus.train.batch([i]) for i in range(8))}
    asked = rows["p.jsonl:1"]
    assert asked.labels[0, :10].tolist() == [-100] * 3 + [*b"answer", 256]
    assert corpus.trained == pytest.approx((3 * 20 + 7) / (3 * 20 + 10))
    identities = {
        corpus.identity,
        mixed(tmp_path, source(write(tmp_path, "a", 3), 2), prompts).identity,
        mixed(tmp_path, prompts, source(write(tmp_path, "a", 3))).identity,
        mixed(tmp_path, source(write(tmp_path, "a", 3)), replace(prompts, loss=Loss.ALL)).identity,
    }
    assert len(identities) == 4


def test_a_refusal_names_the_source(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 3), write(tmp_path, "b", 3)
    with pytest.raises(UnsupportedError, match=r"^data\.sources\[1\]\.path: no file matches"):
        mixed(tmp_path, source(a), source(f"{tmp_path}/none*"))
    with pytest.raises(
        UnsupportedError, match=r"data\.sources\[1\]\.path: another source has the same"
    ):
        mixed(tmp_path, source(a), source(a))
    with pytest.raises(UnsupportedError, match=r"data\.sources\[1\]\.held_out_path: these docum"):
        mixed(tmp_path, source(a), source(b, held_out_path=a))
    write(tmp_path, "ac", 2)
    with pytest.raises(
        UnsupportedError, match=r"data\.sources\[1\]\.held_out_path: .*a\.jsonl.* also"
    ):
        mixed(tmp_path, source(a), source(b, held_out_path=f"{tmp_path}/a*.jsonl"))
    with pytest.raises(UnsupportedError, match=r"weight: expected a number above 0, got 0"):
        source(a, 0)
    with pytest.raises(
        UnsupportedError, match=r"held_out: applies to one source, and there are several"
    ):
        DataConfig(sources=(source(a),), held_out=0.1)
    with pytest.raises(UnsupportedError, match=r"sources: expected one or more, got none"):
        DataConfig(sources=())
