"""Tokens are written once, whole or not at all, and read back as they were."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from farspan.data import token_cache as store_module
from farspan.data.chat import PromptForm
from farspan.data.formats import TextForm
from farspan.data.sources import DataFiles
from farspan.data.token_cache import TokenStore, open_store
from farspan.data.tokenizers import TEXT, ByteTokenizer, Document, HowFar
from farspan.spec import UnsupportedError

PLAIN = TextForm(TEXT)


@dataclass
class Texts:
    """Documents in memory that count how often they are read."""

    texts: list[str]
    reads: int = 0

    def names(self) -> tuple[str, ...]:
        return ("memory",)

    def listing(self) -> list[list[object]]:
        return [["memory", *self.texts]]

    def how_far(self) -> HowFar:
        return HowFar(0, 1)

    def documents(self) -> Iterator[Document]:
        self.reads += 1
        for line, text in enumerate(self.texts, start=1):
            yield Document(0, line, f"memory: line {line}", {TEXT: text})


def open_quietly(source: Texts, cache: Path) -> TokenStore:
    return open_store(source, PLAIN, ByteTokenizer(), cache, lambda *_: None)


def document(store: TokenStore, number: int) -> str:
    span = slice(int(store.starts[number]), int(store.starts[number + 1]) - 1)
    return bytes(store.tokens[span].tolist()).decode()


def test_documents_come_back_with_their_places(tmp_path: Path) -> None:
    source = Texts(["first", "  \n", "", "sécond"])
    store = open_quietly(source, tmp_path)
    assert [document(store, d) for d in range(store.documents())] == ["first", "sécond"]
    assert [store.name(d) for d in range(2)] == ["memory:1", "memory:4"]
    assert store.largest == 256
    assert store.tokens.dtype == np.uint16
    assert isinstance(store.tokens, np.memmap)
    assert len(store.tokens) == store.starts[-1] == 6 + 8


def test_the_second_opening_reads_the_cache(tmp_path: Path) -> None:
    source = Texts(["one", "two"])
    first, again = open_quietly(source, tmp_path), open_quietly(source, tmp_path)
    assert source.reads == 1
    assert first.digest == again.digest
    open_quietly(Texts(["one", "three"]), tmp_path)
    assert first.digest != open_quietly(Texts(["one", "three"]), tmp_path).digest


def test_many_batches_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {number} " * (number % 5 + 1) for number in range(50)]
    whole = open_quietly(Texts(texts), tmp_path / "a")
    monkeypatch.setattr(store_module, "_BATCH_SIZE", 40)
    seen: list[tuple[int, int]] = []
    watched = open_store(
        Texts(texts), PLAIN, ByteTokenizer(), tmp_path / "b", lambda *s: seen.append(s[:2])
    )
    assert whole.digest == watched.digest
    assert len(seen) > 10
    assert seen[-1] == (50, len(whole.tokens))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    digests = set()
    for text in ("one", "other"):
        path.write_text(text)
        source = DataFiles((path,))
        digests.add(
            open_store(source, PLAIN, ByteTokenizer(), tmp_path / "c", lambda *_: None).digest
        )
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["tokens.npy", "starts.npy", "origins.npy", "meta.json"])
def test_a_damaged_cache_is_written_anew(tmp_path: Path, name: str) -> None:
    source = Texts(["one", "two", "three"])
    digest = open_quietly(source, tmp_path).digest
    (path,) = tmp_path.glob(f"*/{name}")
    path.write_bytes(path.read_bytes()[:-3])
    assert open_quietly(source, tmp_path).digest == digest
    assert source.reads == 2


def test_a_cache_of_another_format_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Texts(["one", "two"])
    for number in (1, 2, 1):
        monkeypatch.setattr(store_module, "_FORMAT", number)
        open_quietly(source, tmp_path)
    assert source.reads == 2


@pytest.mark.parametrize("meta", ["[]", "5", '{"tokens": {}}', '{"names": 1}'])
def test_a_foreign_cache_is_written_anew(tmp_path: Path, meta: str) -> None:
    source = Texts(["one", "two", "three"])
    digest = open_quietly(source, tmp_path).digest
    (path,) = tmp_path.glob("*/meta.json")
    path.write_text(meta)
    assert open_quietly(source, tmp_path).digest == digest
    assert source.reads == 2


def test_a_pickle_in_the_cache_is_not_loaded(tmp_path: Path) -> None:
    source = Texts(["one", "two"])
    open_quietly(source, tmp_path)
    (path,) = tmp_path.glob("*/tokens.npy")
    np.save(path, np.array([{}] * 8, dtype=object), allow_pickle=True)
    assert open_quietly(source, tmp_path).tokens.dtype == np.uint16
    assert source.reads == 2


def test_pipes_and_links_in_the_cache_are_not_followed(tmp_path: Path) -> None:
    source = Texts(["one", "two"])
    digest = open_quietly(source, tmp_path).digest
    (path,) = tmp_path.glob("*/starts.npy")
    path.unlink()
    os.mkfifo(path, 0o600)
    assert open_quietly(source, tmp_path).digest == digest
    (lock,) = tmp_path.glob(".*.lock")
    lock.unlink()
    os.mkfifo(lock, 0o600)
    assert open_quietly(source, tmp_path).digest == digest
    lock.unlink()
    (tmp_path / "precious").write_text("precious")
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(UnsupportedError, match=r"data\.cache: cannot write .*\.lock: "):
        open_quietly(source, tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


def test_no_text_at_all_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"data\.path: memory holds no text"):
        open_quietly(Texts(["", " \n"]), tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("rows", [[[], []], [[256], [256]], [[0, 0, 256], [0]]])
def test_text_of_which_nothing_is_known_is_refused_and_leaves_nothing(
    tmp_path: Path, rows: list[list[int]]
) -> None:
    class Deaf(ByteTokenizer):
        def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
            return [np.array(row, dtype=np.int64) for row, _ in zip(rows, texts, strict=True)]

        def signs(self) -> frozenset[int]:
            return frozenset({0, 256})

    with pytest.raises(
        UnsupportedError, match=r"data\.tokenizer: it produced no ordinary tokens for memory"
    ):
        open_store(Texts(["one", "two"]), PLAIN, Deaf(), tmp_path, lambda *_: None)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_an_abandoned_writing_leaves_nothing(tmp_path: Path) -> None:
    def abandon(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_store(Texts(["one"]), PLAIN, ByteTokenizer(), tmp_path, abandon)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_leftovers_of_a_killed_process_are_replaced(tmp_path: Path) -> None:
    source = Texts(["one"])
    open_quietly(source, tmp_path)
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    folder.rename(folder.with_name(f".{folder.name}"))
    (folder.with_name(f".{folder.name}") / "tokens.npy").write_bytes(b"half")
    assert document(open_quietly(source, tmp_path), 0) == "one"
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [folder.name]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "starts.npy")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(
        UnsupportedError,
        match=r"data\.cache: cannot write starts\.npy: No space left on device; free",
    ):
        open_quietly(Texts(["one"]), tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_wide_ids_need_wide_numbers(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        def size(self) -> int:
            return 70_000

        def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
            return [np.array([69_999, len(text)]) for text in texts]

    store = open_store(Texts(["abc"]), PLAIN, Wide(), tmp_path, lambda *_: None)
    assert store.tokens.tolist() == [69_999, 3]
    meta = json.loads(next(tmp_path.glob("*/meta.json")).read_text())
    assert meta["largest"] == store.largest == 69_999


def flip(path: Path, place: int) -> None:
    """One bit of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def everything(store: TokenStore) -> list[object]:
    tokens, trained = store.read(0, len(store.tokens))
    marks = None if trained is None else trained.tolist()
    names = [store.name(d) for d in range(store.documents())]
    return [tokens.tolist(), marks, store.starts.tolist(), names, store.largest, store.digest]


FILES = ("tokens", "starts", "origins", "trained", "blocks")


@pytest.mark.parametrize("name", [*(f"{name}.npy" for name in FILES), "meta.json"])
def test_a_bit_that_changed_is_found_and_mended(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it is: in the headers of arrays, too, whose other bits read the tokens otherwise."""
    form = PromptForm(TEXT, TEXT, everything=False)

    def open_again() -> TokenStore:
        return open_store(source, form, ByteTokenizer(), tmp_path, lambda *_: None)

    source = Texts(["one", "two", "three"])
    expected = everything(open_again())
    for share in (0.0, 0.2, 0.45, 0.6, 0.999):
        (path,) = tmp_path.glob(f"*/{name}")
        flip(path, int(share * path.stat().st_size))
        caplog.clear()
        assert everything(open_again()) == expected
        assert [r.message.startswith(f"data.cache: {path.parent}") for r in caplog.records] == [
            True
        ]
        assert caplog.messages[0].endswith("; farspan rebuilds it")
    assert source.reads == 6


def in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Texts, TokenStore, Path]:
    """A store of many blocks, opened, of which the last is then damaged."""
    monkeypatch.setattr(store_module, "_BLOCK", 256)
    source = Texts([f"text {number}" for number in range(200)])
    open_quietly(source, tmp_path)
    store = open_quietly(source, tmp_path)
    (path,) = tmp_path.glob("*/tokens.npy")
    flip(path, path.stat().st_size - 1)
    return source, store, path


def test_damaged_tokens_are_found_where_they_are_read_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that nobody reads cost nothing; of two readers one makes the tokens anew."""
    source, store, path = in_blocks(tmp_path, monkeypatch)
    begin, end = (int(start) for start in store.starts[-2:])
    other = open_quietly(source, tmp_path)
    store.read(0, 100)
    assert caplog.messages == []
    for reader in (store, other):
        tokens, _ = reader.read(begin, end)
        assert bytes(tokens[:-1].tolist()).decode() == "text 199"
    assert source.reads == 2
    count = len(store.tokens) * 2 // 256 + 1
    assert caplog.messages == [
        f"data.cache: {path.parent}: block {count - 1} of {count} has changed since written; "
        "farspan rebuilds it"
    ]


def test_damaged_tokens_of_data_that_changed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store, _ = in_blocks(tmp_path, monkeypatch)
    source.texts[0] = "changed"
    with pytest.raises(
        UnsupportedError, match=r"data\.cache: .* farspan cannot rebuild it: the data have changed"
    ):
        store.read(len(store.tokens) - 5, len(store.tokens))
    assert source.reads == 1


def test_the_identity_of_data_is_what_it_was(tmp_path: Path) -> None:
    """Checkpoints hold it: the digest of ids and starts, however they are kept."""
    ids = np.array([*b"one", 256, *b"other", 256], "<u2").tobytes()
    starts = np.array([0, 4, 10]).tobytes()
    expected = hashlib.sha256(ids + starts).hexdigest()
    assert open_quietly(Texts(["one", "other"]), tmp_path).digest == expected


def test_an_entry_is_private_and_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    sync, rename = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        done.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_rename)
    before = os.umask(0)
    try:
        open_quietly(Texts(["one"]), tmp_path / "cache")
    finally:
        os.umask(before)
    (path,) = tmp_path.glob("cache/*/tokens.npy")
    inside = {p.stat().st_ino for p in (path.parent, *path.parent.iterdir())}
    assert len(inside) == 6
    assert inside <= set(done[: done.index("renamed")])
    modes = [p.stat().st_mode & 0o777 for p in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_a_cache_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    with pytest.raises(
        UnsupportedError, match=r"data\.cache: .* belongs to .*, but this .*runs as user \d+; name"
    ):
        open_quietly(Texts(["one"]), tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize("given", ["folder", "file", "link"])
def test_what_another_user_put_there_is_refused(tmp_path: Path, given: str) -> None:
    """An entry as it would have been written, an array in it, a link to an own folder."""
    source = Texts(["one"])
    cache = tmp_path / "cache"
    open_quietly(source, cache)
    (path,) = cache.glob("*/tokens.npy")
    if given == "link":
        place, cache = cache, tmp_path / "link"
        cache.symlink_to(place)
        assert open_quietly(source, cache).documents() == 1  # an own link is one
    foreign = {"folder": path.parent, "file": path, "link": cache}[given]
    os.chown(foreign, 12345, 12345, follow_symlinks=False)
    with pytest.raises(
        UnsupportedError, match=rf"data\.cache: {foreign} belongs to user 12345, but this process"
    ):
        open_quietly(source, cache)
    assert source.reads == 1


@pytest.mark.parametrize("mode", [0o770, 0o1777])
def test_a_cache_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(
        UnsupportedError, match=rf"data\.cache: other users may write in {cache}; forbid that"
    ):
        open_quietly(Texts(["one"]), cache)


@pytest.mark.parametrize("name", ["", "tokens.npy"])
def test_an_entry_that_others_could_write_is_made_anew(tmp_path: Path, name: str) -> None:
    source = Texts(["one"])
    open_quietly(source, tmp_path)
    (path,) = tmp_path.glob("*/tokens.npy")
    (path.parent / name).chmod(0o770)
    open_quietly(source, tmp_path)
    open_quietly(source, tmp_path)
    assert source.reads == 2


def test_the_usual_cache_becomes_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions made it with the umask's mode."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = tmp_path / ".cache/farspan"
    cache.mkdir(parents=True)
    cache.chmod(0o775)
    open_quietly(Texts(["one"]), Path("~/.cache/farspan"))
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_whole_cache_is_read_from_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Texts(["first", "second"])
    cache = tmp_path / "cache"
    open_quietly(source, cache)
    opened = os.open

    def read_only(path: os.PathLike[str], flags: int, *rest: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    assert open_quietly(source, cache).documents() == 2
    with pytest.raises(UnsupportedError, match=r"data\.cache: cannot write .*Read-only file"):
        open_quietly(Texts(["third"]), cache)


def test_a_process_without_memory_to_map_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(UnsupportedError, match=r"cannot be mapped: Cannot allocate.*ulimit -v"):
        open_quietly(Texts(["first"]), tmp_path / "cache")
