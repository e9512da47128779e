"""Files that survive whatever happens next, in folders of others too.

A file is made under another name without following a link, written, synced, and only then given its
name. Torch is not needed for that.
"""

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

# A name that starts so is not finished, or is being deleted; a killed process leaves it behind.
PARTIAL = ".partial-"


class WriteFailed(OSError):
    """A file could not be written; the message names it and says what to do."""


class NotDamaged(UnsupportedError):
    """Why a checkpoint cannot be used here and now, although it may well be whole."""


class NotPrivate(OSError):
    """Another user owns a file or folder, or may write it; the message names it and both."""


KEPT = Path("~/.cache/farspan")  # what stays between runs, unless another place is named


def private_folder(folder: Path) -> None:
    """Makes `folder` for this user alone, or sees that only this user may write there. Raises
    NotPrivate, and OSError where it cannot be made."""
    kept = KEPT.expanduser()
    own = folder.is_relative_to(kept)
    if own and folder != kept:
        private_folder(kept)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_foreign(folder)
    if is_open(folder):
        if not own:
            raise NotPrivate(
                f"others may write in {folder}; make it yours alone (chmod go-w), or name another "
                "folder"
            )
        folder.chmod(0o700)  # farspan's own, made by an earlier version with the umask's mode


def refuse_foreign(path: Path) -> None:
    """Raises NotPrivate unless `path` is this user's, and so is what it is a link to."""
    for status in (path.lstat(), path.stat()):
        if status.st_uid != os.geteuid():
            raise NotPrivate(
                f"{path} belongs to {_user(status.st_uid)}, and this is {_user(os.geteuid())}; "
                "name a folder of your own"
            )


def is_open(path: Path) -> bool:
    """Whether others than its owner may write it."""
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def create(path: Path) -> BinaryIO:
    """Open a new file for writing, in place of what has its name: of a link, the link goes."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def write_bytes(path: Path, data: bytes) -> None:
    """Write and sync a new file. Raises WriteFailed."""
    try:
        with create(path) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure(path, error.strerror or str(error)) from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file: a reader sees the old bytes or the new ones. Raises WriteFailed."""
    partial = path.with_name(PARTIAL + path.name)
    try:
        write_bytes(partial, data)
        publish(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_output(path: Path, content: str | bytes, option: str) -> None:
    """Write a file that the user named by `option`; an earlier one stays until the new one is
    whole. Raises UnsupportedError, naming the option."""
    # What names of files have that is no Unicode becomes a question mark.
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
    """Raise UnsupportedError, naming the option, before what takes long, where no file can be
    written, or a `new` one is there."""
    if path is None:
        return
    wrong, folder = "", path.parent
    if new and path.exists():
        wrong = "is there already; delete it"
    elif path.is_dir():
        wrong = "is a folder; name a file in it"
    elif not folder.is_dir():
        wrong = f"cannot be written: no such folder; make it with mkdir -p {quote(str(folder))}"
    if wrong:
        raise UnsupportedError(f"{option}: {path} {wrong}, or name another file")


def refuse_links(folder: Path, *others: Path) -> None:
    """Raises UnsupportedError where anything under a folder is a link that leads out of it and the
    `others`: a folder that somebody else made may point at any file of the user's; or is neither a
    file nor a folder, such as a pipe, which has no end. What is in `wandb` is left to that library,
    whose logs are links to its cache."""
    root = Path(os.path.realpath(folder))
    for place in root.rglob("*"):
        inside = place.relative_to(root).parts
        if inside[0] == "wandb" and len(inside) > 1:
            continue
        real = Path(os.path.realpath(place))
        if place.is_symlink() and not any(map(real.is_relative_to, (root, *others))):
            raise UnsupportedError(
                f"{folder / place.relative_to(root)} is a link to {os.readlink(place)}, outside of "
                "its folder, which is neither read nor written; put the file itself there, or "
                "remove the link"
            )
        refuse_pipes(folder / place.relative_to(root))


def refuse_pipes(*places: Path) -> None:
    """Raises NotDamaged where one of these is a pipe, say, which has no end."""
    for place in places:
        if place.exists():
            with readable(place):
                pass


_HELD = re.compile(r"/proc/self/fd/(\d+)")
# Folders that are held open: by their place there, the name that the user gave and its real path.
HELD: dict[str, tuple[str, str]] = {}


def shown(text: object) -> str:
    """Return a text with the folders in it that are held open by the names that they have now: the
    user's, or another where they were renamed."""

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
    """Makes a folder, whose files get the umask's modes whoever writes them. What fails inside
    removes it: the disk may be full. Raises WriteFailed."""
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
    """Gives a finished file or folder its name, replacing what has it. Raises WriteFailed."""
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
    """Remove a folder as far as that can be, a file, or a link itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Removes a folder; one that is half removed no longer has its name. Of a link to a folder,
    the link. Raises WriteFailed."""
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
    """Gives a file or folder, if it is still there, another name beside it. Raises WriteFailed."""
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
    """Removes what a killed process left unfinished directly under `folder`: what has one of `ours`
    behind `PARTIAL`. Any other is the user's."""
    for path in folder.glob(f"{PARTIAL}*"):
        if not ours.fullmatch(path.name.removeprefix(PARTIAL)):
            continue
        clear(path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises UnsupportedError, naming the file, where it, or what is under it, is missing, and
    NotDamaged where the system does not let it be read, or it is a pipe, say, which has no end."""
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


DEEPEST = 64  # levels of lists and objects within each other; farspan writes fewer than ten
LARGEST = 1e300  # of a number: a float has little more, and JSON more than that
# What code meets in a file whose values are of other kinds than it reads.
WRONG = AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError
KINDS = {dict: "an object", list: "a list", str: "text", int: "a whole number"}


def parse_object(data: bytes, finite: bool = True, /, **kinds: type) -> dict[str, Any]:
    """Return the object of a JSON text; fields that it has are of these `kinds`. Raises ValueError,
    naming the field, for others, numbers that are not `finite`, and deep nesting, in which later
    work would fail."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # the latter by what is nested too deeply
        raise ValueError(f"cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    refuse_odd(found, finite=finite)
    for name, kind in kinds.items():
        if not isinstance(found.get(name, kind()), kind):
            raise ValueError(f"{name}: expected {KINDS[kind]}, got {found[name]!r:.80}")
    return found


def refuse_odd(value: Any, field: str = "", depth: int = 0, *, finite: bool = True) -> None:
    """Raises ValueError, naming the field, for numbers that are not `finite`, and deep nesting.
    Overrides of a model may be infinite."""
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
    """Raises UnsupportedError, naming the file, where what it says is not what is expected."""
    try:
        yield
    except UnsupportedError:
        raise
    except (*WRONG, RecursionError) as error:
        raise UnsupportedError(f"{path}: damaged or changed: {error}") from error


def expect_json(path: Path, **kinds: type) -> dict[str, Any]:
    """Return the object in a JSON file, whoever wrote it. Raises UnsupportedError, naming the file
    and the field, when there is no such thing."""
    with readable(path):
        data = path.read_bytes()
    try:
        return parse_object(data, **kinds)
    except ValueError as error:
        raise UnsupportedError(f"{path}: {' '.join(str(error).split())}") from error


def given_json(path: Path, **kinds: type) -> dict[str, Any]:
    """As `expect_json`; empty where there is no such file."""
    return expect_json(path, **kinds) if os.path.lexists(path) else {}


def read_json(path: Path, *, finite: bool = True, **kinds: type) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no such thing, whatever is in its place."""
    try:
        return parse_object(path.read_bytes(), finite, **kinds) if path.is_file() else None
    except (OSError, ValueError):
        return None


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """What was written there is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_failure(path: Path, reason: str) -> WriteFailed:
    """What is raised where a file could not be written."""
    return WriteFailed(
        f"cannot write {shown(path)}: {reason}; free some space or fix its permissions, then run "
        "the same command again"
    )
