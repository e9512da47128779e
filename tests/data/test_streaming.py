"""Sources that are read a window at a time, because they do not fit the disk."""

import gzip
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import parquet

from farspan.data.config import DataConfig, PackingKind, SourceKind, WeightedSource
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.packing import Packing
from farspan.data.sources import DataFiles
from farspan.data.streaming import FACTS, Stream
from farspan.data.token_cache import TokenStore
from farspan.data.tokenizers import ByteTokenizer, load_tokenizer
from farspan.spec import UnsupportedError
from tests.data.characters import character_tokenizer
from tests.data.test_chat import CHAT, TURNS

CONTEXT = 64
COUNT, SIZE = 150, 40  # documents, and bytes of each at most
WINDOWS = 11  # of 400 bytes


def texts(count: int = COUNT, size: int = SIZE) -> list[str]:
    draw = random.Random(0)
    return [f"{n} ".ljust(draw.randrange(size // 2, size), ".") for n in range(count)]


def lines(count: int = COUNT) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts(count)).encode()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines())
    return path


def opened(path: Path | str, cache: str = "cache", seed: int = 0, **fields: Any) -> Corpus:
    where = Path(path).parent / cache
    config = DataConfig(path=str(path), streaming=True, cache=str(where))
    config = replace(config, **{"window": "400B", **fields})
    return open_corpus(config, ByteTokenizer(), context=CONTEXT, seed=seed, watch=lambda *_: None)


def stream_of(corpus: Corpus) -> Stream:
    (stream,) = corpus.streams()
    return stream


def allow(*_: object) -> None:
    """Whatever is in a window."""


def same(one: Stream, other: Stream, indices: list[int]) -> bool:
    found = [own.batch([i]) for i in indices for own in (one, other)]
    return all(
        np.array_equal(getattr(a, name), getattr(b, name)) and a.names == b.names
        for a, b in zip(found[::2], found[1::2], strict=True)
        for name in ("input_ids", "labels", "document_ids")
    )


def a_pass(stream: Stream) -> int:
    """Sequences until the stream begins again."""
    windows = 0
    while windows < len(stream._facts) or stream._facts[-1].end is not None:
        stream._packing(0, windows)
        windows += 1
    return sum(facts.sequences for facts in stream._facts)


def names(stream: Stream, indices: Iterator[int] | range) -> Counter[str]:
    return Counter(name for i in indices for name in stream.batch([i]).names[0])


@pytest.mark.parametrize("packing", PackingKind)
def test_a_sequence_is_a_pure_function_of_its_index(rows: Path, packing: PackingKind) -> None:
    through = stream_of(opened(rows, packing=packing))
    count = a_pass(through)
    order = random.Random(1).sample(range(3 * count), 16)
    assert same(through, stream_of(opened(rows, packing=packing)), order)
    shutil.rmtree(rows.parent / "cache")
    assert same(through, stream_of(opened(rows, packing=packing)), order[:6])
    other = stream_of(opened(rows, packing=packing, seed=1))
    assert not same(through, other, [*range(count)])


@pytest.mark.parametrize("packing", PackingKind)
def test_each_document_is_read_once_a_pass_in_another_order(
    rows: Path, packing: PackingKind
) -> None:
    stream = stream_of(opened(rows, packing=packing))
    count = a_pass(stream)
    tokens = sum(len(text) + 1 for text in texts())
    first = [stream.batch([i]) for i in range(count)]
    again = [stream.batch([i]) for i in range(count, 2 * count)]
    assert [sum(own.tokens for own in turn) for turn in (first, again)] == [tokens, tokens]
    read = Counter(name for own in first for name in set(own.names[0]))
    assert set(read) == {f"{rows}:{line}" for line in range(1, COUNT + 1)}
    if packing is PackingKind.WHOLE:
        assert set(read.values()) == {1}
    assert [own.names for own in first] != [own.names for own in again]


def test_sequences_are_shuffled_within_a_window_alone(rows: Path) -> None:
    stream = stream_of(opened(rows))
    count, sizes = a_pass(stream), [len(text) for text in texts()]
    window, total, windows = 0, 0, []
    for size in sizes:
        windows.append(window)
        total += size
        if total >= 400:
            window, total = window + 1, 0
    order = [
        {windows[int(name.rpartition(":")[2]) - 1] for name in stream.batch([i]).names[0]}
        for i in range(count)
    ]
    assert all(len(own) == 1 for own in order)
    flat = [own.pop() for own in order]
    assert flat == sorted(flat)
    assert flat[-1] == windows[-1] == WINDOWS - 1
    lines_read = [
        int(n.rpartition(":")[2]) for i in range(count) for n in stream.batch([i]).names[0]
    ]
    assert lines_read != sorted(lines_read)


def cached(folder: Path) -> int:
    while True:
        try:
            return sum(p.stat().st_size for p in folder.rglob("tokens.npy"))
        except FileNotFoundError:  # it was deleted just now
            continue


@pytest.mark.parametrize("ahead", [False, True])
def test_the_cache_is_bounded(rows: Path, ahead: bool) -> None:
    corpus = opened(rows)
    if ahead:
        corpus.read_ahead(allow)
    stream, cache = stream_of(corpus), rows.parent / "cache"
    most = 0
    for index in range(a_pass(stream) * 2):
        stream.batch([index])
        folders = [p.name for p in stream.folder.iterdir() if p.is_dir()]
        most = max(most, len(folders))
        assert cached(cache) <= 5 * (2 * (400 + SIZE + 20) + 128), folders
    assert len(stream._facts) == WINDOWS
    assert most <= 5


def test_the_next_window_is_read_while_one_trains(rows: Path) -> None:
    corpus = opened(rows)
    stream = stream_of(corpus)
    stream.batch([0])
    assert stream._ahead is None  # `farspan data` opens the first window alone
    assert len(stream._facts) == 1
    corpus.read_ahead(allow)
    stream.batch([0])
    assert stream._ahead is not None
    stream._ahead.found.result()
    assert len(stream._facts) == 2
    assert sorted(p.name for p in stream.folder.iterdir() if p.is_dir()) == ["000000", "000001"]


def test_what_fails_ahead_is_said_at_the_step_that_needs_it(rows: Path) -> None:
    good = lines(20)
    rows.write_bytes(good + b'{"text": \n' + good)
    corpus = opened(rows)
    corpus.read_ahead(allow)
    stream = stream_of(corpus)
    for index in range(stream.kept.sequences):
        stream.batch([index])
    with pytest.raises(UnsupportedError, match=r"rows\.jsonl: line 21 is not valid JSON"):
        stream.batch(range(99))


def test_facts_that_are_gone_or_damaged_are_made_again(rows: Path) -> None:
    through = stream_of(opened(rows, cache="other"))
    last = a_pass(through) - 1
    stream = stream_of(opened(rows))
    assert same(through, stream, [last])
    file = stream.folder / FACTS
    for damage in (file.unlink, lambda: file.write_text('{"windows": [{"end": 3}]}')):
        damage()
        assert same(through, stream_of(opened(rows)), [last, 0])
    # With the facts, what lies before is not read again.
    shutil.rmtree(stream.folder / "000001", ignore_errors=True)
    assert same(through, stream_of(opened(rows)), [last])
    assert not (stream.folder / "000001").exists()


def test_tokens_without_facts_are_those_of_a_killed_process(rows: Path) -> None:
    stream = stream_of(opened(rows))
    known = a_pass(stream)
    (stream.folder / FACTS).write_text(json.dumps({"windows": []}))
    again = stream_of(opened(rows))
    assert a_pass(again) == known
    assert again.digests() == stream.digests()


def test_data_that_changed_are_named(rows: Path) -> None:
    stream = stream_of(opened(rows))
    last, times = a_pass(stream) - 1, rows.stat()
    digests = stream.digests()
    data = rows.read_bytes()
    at = data.index(b"60 ")
    rows.write_bytes(data[:at] + b"61 " + data[at + 3 :])
    # The run knows the windows that it has read.
    other = stream_of(opened(rows))
    other.expect(digests)
    with pytest.raises(UnsupportedError, match=r"rows\.jsonl: the documents of window 4 have"):
        other.batch([last])
    # And so do the facts, where nothing else tells that the file is another one.
    os.utime(rows, ns=(times.st_atime_ns, times.st_mtime_ns))
    later = stream_of(opened(rows))
    with pytest.raises(UnsupportedError, match=r"window 4 have changed .* begin again in another"):
        later.batch(range(last))


def test_windows_that_train_nothing_are_passed_over(tmp_path: Path) -> None:
    blank = tmp_path / "blank.jsonl"
    good = json.dumps({"text": "x" * 39}) + "\n"
    blank.write_text(good * 20 + '{"text": " "}\n' * 500 + good * 20 + '{"text": ""}\n')
    stream = stream_of(opened(blank))
    stream.check = allow
    count = a_pass(stream)
    assert len(stream._facts) == 5 + 1
    assert sum(facts.sequences == 0 for facts in stream._facts) == 2
    assert sum(stream.batch([i]).tokens for i in range(count)) == 40 * 40
    assert same(stream, stream_of(opened(blank)), [0, count - 1, count, 2 * count - 1])


def test_held_out_documents_of_the_first_window_never_train(rows: Path) -> None:
    corpus = opened(rows, held_out=0.3)
    stream, aside = stream_of(corpus), corpus.held_out
    assert isinstance(aside, Packing)
    held = {n for i in range(aside.kept.sequences) for n in aside.once(i).names[0]}
    count = a_pass(stream)
    trained = names(stream, range(2 * count))
    assert set(trained.values()) == {2}
    assert held | set(trained) == {f"{rows}:{line}" for line in range(1, COUNT + 1)}
    assert len(held) == round(0.3 * corpus.parts[0].stores[0].documents()) > 2
    assert not held & set(trained)


def test_a_mixture_of_a_stream_and_a_whole_source_has_the_shares(rows: Path) -> None:
    whole = rows.with_name("whole.jsonl")
    whole.write_text("".join(json.dumps({"text": "w" * 63}) + "\n" for _ in range(9)))
    sources = (
        WeightedSource(path=str(rows), weight=3, streaming=True, window="1KiB"),
        WeightedSource(path=str(whole), weight=1),
    )
    config = DataConfig(sources=sources, cache=str(rows.parent / "cache"))

    def mixed() -> Corpus:
        return open_corpus(config, ByteTokenizer(), context=CONTEXT, seed=0, watch=lambda *_: None)

    corpus, tokens = mixed(), Counter[str]()
    for index in range(400):
        batch = corpus.train.batch([index])
        tokens[batch.names[0][0].rpartition(":")[0]] += batch.tokens
    # By the mean tokens of a sequence of the first window.
    assert tokens[str(rows)] / tokens.total() == pytest.approx(0.75, abs=0.02)
    again = mixed().train.batch([399, 3])
    assert np.array_equal(again.input_ids, corpus.train.batch([399, 3]).input_ids)
    assert corpus.sequences_per_epoch() is None


def write_zst(folder: Path) -> Path:
    path = folder / "rows.jsonl.zst"
    with pa.output_stream(path, compression="zstd") as out:
        out.write(lines())
    return path


def write_gz(folder: Path) -> Path:
    """Files of several kinds, each with some of the rows."""
    own = folder / "mixed"
    own.mkdir()
    parts = [texts()[start : start + 30] for start in range(0, COUNT, 30)]
    (own / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines(COUNT).splitlines(True)[:30])))
    (own / "b.csv").write_text("text\n" + "".join(f"{text}\n" for text in parts[1]))
    (own / "c.json").write_text(json.dumps([{"text": text} for text in parts[2]]))
    parquet.write_table(pa.table({"text": parts[3]}), own / "d.parquet", row_group_size=5)
    for number, text in enumerate(parts[4]):
        (own / f"e{number:02}.txt").write_text(text)
    return own


def write_parquet(folder: Path) -> Path:
    own = folder / "tables"
    own.mkdir()
    for number in range(3):
        table = pa.table({"text": texts()[50 * number : 50 * (number + 1)]})
        parquet.write_table(table, own / f"{number}.parquet", row_group_size=7)
    return own


def write_hub(folder: Path) -> Path:
    """As a dataset's repository on the hub has its files."""
    own = folder / "set"
    (own / "data").mkdir(parents=True)
    for number in range(2):
        rows = texts()[75 * number : 75 * (number + 1)]
        name = f"train-{number:05}-of-00002.parquet"
        Dataset.from_dict({"text": rows, "id": [*range(75)]}).to_parquet(own / "data" / name)
    return own


def write_saved(folder: Path) -> Path:
    Dataset.from_dict({"text": texts(), "id": [*range(COUNT)]}).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("write", [write_zst, write_gz, write_parquet, write_hub, write_saved])
def test_every_kind_of_source_is_read_from_any_place(tmp_path: Path, write: Any) -> None:
    path, fields = write(tmp_path), dict[str, Any]()
    if write in (write_hub, write_saved):
        fields = {"source": SourceKind.DATASET, "ignore": ("id",)}
    stream = stream_of(opened(path, **fields))
    count = a_pass(stream)
    read = Counter(
        ByteTokenizer().decode(row.input_ids[0][row.document_ids[0] == n]).partition(" ")[0]
        for row in (stream.batch([i]) for i in range(count))
        for n in range(len(row.names[0]))
    )
    assert read == Counter(str(n) for n in range(COUNT))
    # From the facts alone, as a resumed run does it: the stream is opened in its midst.
    shutil.copytree(stream.folder, tmp_path / "kept", ignore=shutil.ignore_patterns("0*"))
    shutil.rmtree(stream.folder)
    shutil.move(tmp_path / "kept", stream.folder)
    order = random.Random(2).sample(range(2 * count), 20)
    assert same(stream, stream_of(opened(path, **fields)), [2 * count // 3, *order])


def test_ranks_that_take_turns_go_on_behind_each_other_s_windows(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither begins again for a window: that would read the file as often as it has windows."""
    begun, behind = list[list[Any]](), DataFiles.behind

    def counted(self: DataFiles, place: list[Any]) -> Any:
        begun.append(place)
        return behind(self, place)

    monkeypatch.setattr(DataFiles, "behind", counted)
    alone = stream_of(opened(rows, cache="other"))
    a_pass(alone)
    begun.clear()
    one, two = (stream_of(opened(rows)) for _ in range(2))
    for window in range(1, WINDOWS):
        for stream in (one, two)[:: 1 if window % 2 else -1]:
            stream._packing(0, window)
    assert one.digests() == two.digests() == alone.digests()
    assert len(begun) == 2


def test_a_window_that_the_model_cannot_take_is_refused_by_name(rows: Path) -> None:
    seen = list[int]()

    def check(_: object, store: TokenStore) -> None:
        seen.append(store.longest())
        if "4 " in store.place_of(0) or store.origins[0, 1] > 60:
            raise UnsupportedError(f"{store.place_of(3)}: too long")

    corpus = opened(rows)
    corpus.read_ahead(check)
    with pytest.raises(UnsupportedError, match=r"rows\.jsonl:\d+: too long"):
        corpus.train.batch(range(999))
    assert 3 < len(seen) < 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": "1MiB"}, "window: only a stream is read in windows; set streaming to true"),
        ({"streaming": True, "window": "256"}, "window: 256 has no unit .*; write 256MiB"),
        ({"streaming": True, "window": "large"}, "window: expected bytes such as 128GiB"),
    ],
)
def test_what_is_said_in_vain_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        DataConfig(path="a.jsonl", **fields)


def test_chats_are_read_ahead_by_their_template(tmp_path: Path) -> None:
    """A child of the thread runs it."""
    folder, path = tmp_path / "tokenizer", tmp_path / "chats.jsonl"
    character_tokenizer(TURNS).save_pretrained(folder)

    path.write_text((json.dumps({"messages": CHAT}) + "\n") * 30)
    config = DataConfig(path=str(path), streaming=True, window="100B", tokenizer=str(folder))
    config = replace(config, cache=str(tmp_path / "cache"))
    use = load_tokenizer(str(folder))
    corpus = open_corpus(config, use, context=CONTEXT, seed=0, watch=lambda *_: None)
    corpus.read_ahead(allow)
    stream = stream_of(corpus)
    labels = [stream.batch([i]).labels for i in range(20)]
    assert len(stream._facts) > 3
    assert all((row != -100).any() for row in labels)


def test_a_split_that_is_held_out_is_not_copied_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_hub(tmp_path)
    Dataset.from_dict({"text": ["held"] * 9, "id": [*range(9)]}).to_parquet(
        path / "data" / "test-00000-of-00001.parquet"
    )
    monkeypatch.setattr("datasets.load_dataset", None)  # makes files of all splits
    corpus = opened(path, source=SourceKind.DATASET, ignore=("id",), held_out_split="test")
    assert corpus.held_out is not None
    assert corpus.held_out.kept.documents == 9
    assert corpus.held_out.kept.tokens == 45
