"""Durable files: written under another name, without following a link, synced, and then renamed.
Needs no torch."""

import hashlib
import json
import os
import pwd
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from farspan.spec import UnsupportedError

# A name with this prefix marks an unfinished file, or one being deleted; a killed process leaves it
# behind.
PARTIAL = ".partial-"


class WriteFailed(OSError):
    """A file could not be written; the message names the file and the remedy."""


class NotDamaged(UnsupportedError):
    """A checkpoint cannot be used here and now, although its files may be whole."""


class NotPrivate(OSError):
    """Another user owns a file or folder, or may write to it; the message names the path."""


KEPT = Path("~/.cache/farspan")  # files kept between runs, by default


def private_folder(folder: Path) -> None:
    """Make a folder that only this user may access. If it exists, check that no other user may
    write there. Raises NotPrivate, or OSError if the folder cannot be made."""
    kept = KEPT.expanduser()
    own = folder.is_relative_to(kept)
    if own and folder != kept:
        private_folder(kept)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_foreign(folder)
    if is_open(folder):
        if not own:
            raise NotPrivate(
                f"other users may write in {folder}; forbid that (chmod go-w {folder}), or name "
                "another folder"
            )
        folder.chmod(0o700)  # made by an earlier version of farspan with the umask's mode


def refuse_foreign(path: Path) -> None:
    """Raise NotPrivate unless this user owns `path` and, if it is a link, the link's target."""
    for status in (path.lstat(), path.stat()):
        if status.st_uid != os.geteuid():
            raise NotPrivate(
                f"{path} belongs to {_user(status.st_uid)}, but this process runs as "
                f"{_user(os.geteuid())}; name a folder of your own"
            )


def is_open(path: Path) -> bool:
    """Return whether users other than the owner may write to a file or folder."""
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def create(path: Path) -> BinaryIO:
    """Create a new file for writing, after removing a file or link of that name."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def write_bytes(path: Path, data: bytes) -> None:
    """Write data to a new file, and sync it. Raises WriteFailed."""
    try:
        with create(path) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure(path, error.strerror or str(error)) from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file such that readers see either the old or the new bytes. Raises WriteFailed."""
    partial = path.with_name(PARTIAL + path.name)
    try:
        write_bytes(partial, data)
        publish(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_output(path: Path, content: str | bytes, option: str) -> None:
    """Write a file at the path that the user set by `option`. An existing file stays until the new
    one is complete. Raises UnsupportedError, naming the option."""
    # Bytes of file names that are not Unicode become question marks.
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a terminal
        else:
            write_whole(path, data)
    except OSError as error:
        reason = error.__cause__ if isinstance(error, WriteFailed) else error
        assert isinstance(reason, OSError)
        raise UnsupportedError(
            f"{option}: {path} cannot be written: {reason.strerror or reason}; free some space, "
            "fix its permissions, or name another file"
        ) from error


def check_place(path: Path | None, option: str, *, new: bool = False) -> None:
    """Check, before long work, that a file can be written at `path` afterwards. Raises
    UnsupportedError, naming the option, if not, or if a file that must be `new` exists."""
    if path is None:
        return
    wrong, folder = "", path.parent
    if new and path.exists():
        wrong = "exists already; delete it"
    elif path.is_dir():
        wrong = "is a folder; name a file in it"
    elif path.exists() and not path.is_file():
        wrong = "is not a file and would be replaced; remove it"
    elif not folder.is_dir():
        wrong = f"cannot be written: no such folder; make it with mkdir -p {quote(str(folder))}"
    if wrong:
        raise UnsupportedError(f"{option}: {path} {wrong}, or name another file")


def refuse_links(folder: Path, *others: Path) -> None:
    """Raise UnsupportedError if a folder contains a link to a place outside of `folder` and
    `others`, or something else than files and folders, such as a pipe, whose reading never ends. A
    folder made by another user may point at any file of this user. Links in `wandb` are exempt: its
    logs are links to its cache."""
    root = Path(os.path.realpath(folder))
    for place in root.rglob("*"):
        inside = place.relative_to(root).parts
        if inside[0] == "wandb" and len(inside) > 1:
            continue
        real = Path(os.path.realpath(place))
        if place.is_symlink() and not any(map(real.is_relative_to, (root, *others))):
            raise UnsupportedError(
                f"{folder / place.relative_to(root)} is a link to {os.readlink(place)}, outside of "
                "its folder; farspan neither reads nor writes it: put the file itself there, or "
                "remove the link"
            )
        refuse_pipes(folder / place.relative_to(root))


def refuse_pipes(*places: Path) -> None:
    """Raise NotDamaged if a path is neither file nor folder: reading a pipe may never end."""
    for place in places:
        if place.exists():
            with readable(place):
                pass


_HELD = re.compile(r"/proc/self/fd/(\d+)")
# Folders held open: the user's name and the real path, by /proc path.
HELD: dict[str, tuple[str, str]] = {}


def shown(text: object) -> str:
    """Return a message with readable paths instead of those of file descriptors, by which this
    process holds folders open. A readable path is as the user wrote it, or new after a rename."""

    def name(found: re.Match[str]) -> str:
        try:
            now = os.readlink(found[0])
        except OSError:
            return found[0]
        given, was = HELD.get(found[0], (now, now))
        return given if now == was else now

    return _HELD.sub(name, str(text))


@contextmanager
def writing(folder: Path, *others: type[Exception]) -> Iterator[None]:
    """Make a new folder for the block to fill; if the block fails, remove the folder: the disk may
    be full. Files get the modes that the umask allows, whatever wrote them. Raises WriteFailed."""
    try:
        clear(folder)
        folder.mkdir(parents=True)
        yield
        mode = folder.stat().st_mode & 0o666
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(mode)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, (*others, OSError)) and not isinstance(error, WriteFailed):
            raise write_failure(folder, str(error)) from error
        raise


def publish(partial: Path, path: Path) -> None:
    """Sync a finished file or folder, and rename it to `path`. Raises WriteFailed."""
    try:
        if partial.is_dir():
            for inner in partial.rglob("*"):
                sync(inner)
            sync(partial)
            discard(path)
        os.replace(partial, path)
        sync(path.parent)
    except OSError as error:
        raise write_failure(path, error.strerror or str(error)) from error


def clear(path: Path) -> None:
    """Delete a file, a link (not its target), or as much of a folder as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete a folder, renamed first so that its name never stands for a half-deleted folder. If it
    is a link, delete the link, not its target. Raises WriteFailed."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            doomed = folder.with_name(f"{PARTIAL}old-{folder.name}")
            clear(doomed)
            os.replace(folder, doomed)
            clear(doomed)
    except OSError as error:
        raise WriteFailed(
            f"cannot remove {shown(folder)}: {error.strerror or error}; fix its permissions, or "
            "move it away, then run the same command again"
        ) from error


def move(path: Path, place: Path) -> None:
    """Rename a file or folder to `place` in the same folder, if it exists. Raises WriteFailed."""
    try:
        if os.path.lexists(path):
            os.replace(path, place)
            sync(place.parent)
    except OSError as error:
        raise WriteFailed(
            f"cannot rename {shown(path)} to {place.name}: {error.strerror or error}; move it "
            "away, then run the same command again"
        ) from error


def remove_leftovers(folder: Path, ours: re.Pattern[str]) -> None:
    """Delete the unfinished files that a killed process left in `folder`. Their names are `PARTIAL`
    followed by a match of `ours`; all other files belong to the user."""
    for path in folder.glob(f"{PARTIAL}*"):
        if ours.fullmatch(path.name.removeprefix(PARTIAL)):
            clear(path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert errors of reading `path` in the block: to UnsupportedError, naming the file, if it or
    a file below is missing; to NotDamaged if it is a pipe or cannot be read."""
    try:
        mode = path.stat().st_mode if os.path.lexists(path) else stat.S_IFREG
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise NotDamaged(f"{path}: cannot be read: neither a file nor a folder")
        yield
    except FileNotFoundError as error:
        raise UnsupportedError(f"{error.filename or path}: missing") from error
    except OSError as error:
        raise NotDamaged(
            f"{error.filename or path}: cannot be read: {error.strerror or error}"
        ) from error


DEEPEST = 64  # levels of nested lists and objects; farspan writes fewer than ten
LARGEST = 1e300  # largest number; a float has little more range, and JSON more than a float
# Errors of code that reads a file with values of the wrong kind.
WRONG = AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError
KINDS = {dict: "an object", list: "a list", str: "text", int: "a whole number"}


def parse_object(data: bytes, finite: bool = True, /, **kinds: type) -> dict[str, Any]:
    """Parse a JSON object. `kinds` are the types that its fields must have, if present. Raises
    ValueError, naming the field, for other types, for infinite numbers if `finite`, and for nesting
    so deep that later code would fail."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # the latter for deep nesting
        raise ValueError(f"cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    refuse_odd(found, finite=finite)
    for name, kind in kinds.items():
        if not isinstance(found.get(name, kind()), kind):
            raise ValueError(f"{name}: expected {KINDS[kind]}, got {found[name]!r:.80}")
    return found


def refuse_odd(value: Any, field: str = "", depth: int = 0, *, finite: bool = True) -> None:
    """Raise ValueError, naming the field, if a JSON value nests too deeply or, with `finite`,
    contains an infinite number. Numbers in a model's `overrides` may be infinite."""
    if depth > DEEPEST:
        raise ValueError(f"{field}: nested more than {DEEPEST} levels deep")
    if isinstance(value, int | float) and finite and not abs(value) < LARGEST:
        raise ValueError(f"{field}: expected a finite number, got {value!r:.80}")
    pairs = value.items() if isinstance(value, dict) else ()
    items: Any = enumerate(value) if isinstance(value, list) else pairs
    for key, inner in items:
        name = field if depth > 3 else f"{field}.{key}".removeprefix(".")
        refuse_odd(inner, name, depth + 1, finite=finite and key != "overrides")


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Convert errors of a file's content in the block to UnsupportedError, naming the file."""
    try:
        yield
    except UnsupportedError:
        raise
    except (*WRONG, RecursionError) as error:
        raise UnsupportedError(f"{path}: damaged or changed: {error}") from error


def expect_json(path: Path, **kinds: type) -> dict[str, Any]:
    """Read an object from a JSON file of any origin. Raises UnsupportedError, naming the file and
    the field, if the file is missing or unusable."""
    with readable(path):
        data = path.read_bytes()
    try:
        return parse_object(data, **kinds)
    except ValueError as error:
        raise UnsupportedError(f"{path}: {' '.join(str(error).split())}") from error


def given_json(path: Path, **kinds: type) -> dict[str, Any]:
    """Read an object from a JSON file as `expect_json` does; {} if there is no file."""
    return expect_json(path, **kinds) if os.path.lexists(path) else {}


def read_json(path: Path, *, finite: bool = True, **kinds: type) -> dict[str, Any] | None:
    """Read an object from a JSON file; None if it is missing, unreadable or not an object."""
    try:
        return parse_object(path.read_bytes(), finite, **kinds) if path.is_file() else None
    except (OSError, ValueError):
        return None


def digest(path: Path) -> str:
    """Return a file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force the written data of a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_failure(path: Path, reason: str) -> WriteFailed:
    """Return the error that says that a file could not be written."""
    return WriteFailed(
        f"cannot write {shown(path)}: {reason}; free some space or fix its permissions, then run "
        "the same command again"
    )
