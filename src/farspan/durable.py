"""Files that survive whatever happens next: written, synced, and only then given their name; and
folders of which nobody else has a say."""

import hashlib
import json
import os
import pwd
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

# A name that starts so is not finished, or is being deleted; a killed process leaves it behind.
PARTIAL = ".partial-"


class WriteFailed(OSError):
    """A file could not be written; the message names it and says what to do."""


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


def write_bytes(path: Path, data: bytes) -> None:
    """Writes and syncs a file in place. Raises WriteFailed."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure(path, error.strerror or str(error)) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes and syncs one safetensors file in place. Raises WriteFailed."""
    try:
        path.touch()
        mode = stat.S_IMODE(path.stat().st_mode)  # of the umask, as any file made here
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(mode)  # safetensors 0.8 makes every file 0600
        sync(path)
    except (SafetensorError, OSError) as error:
        raise write_failure(path, str(error)) from error


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file: a reader sees the old bytes or the new ones. Raises WriteFailed."""
    partial = path.with_name(PARTIAL + path.name)
    write_bytes(partial, data)
    publish(partial, path)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Makes a folder, whose files get the umask's modes whoever writes them. What fails inside
    removes it: the disk may be full. Raises WriteFailed."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield
        mode = folder.stat().st_mode & 0o666
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(mode)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, (SafetensorError, OSError)) and not isinstance(error, WriteFailed):
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


def discard(folder: Path) -> None:
    """Removes a folder; one that is half removed no longer has its name. Of a link to a folder,
    the link. Raises WriteFailed."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            doomed = folder.with_name(f"{PARTIAL}old-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    except OSError as error:
        raise WriteFailed(
            f"cannot remove {folder}: {error.strerror or error}; fix its permissions, or move it "
            "away, then run the same command again"
        ) from error


def move(path: Path, place: Path) -> None:
    """Gives a file or folder, if it is still there, another name beside it. Raises WriteFailed."""
    try:
        if os.path.lexists(path):
            os.replace(path, place)
            sync(place.parent)
    except OSError as error:
        raise WriteFailed(
            f"cannot rename {path} to {place.name}: {error.strerror or error}; move it away, then "
            "run the same command again"
        ) from error


def remove_leftovers(folder: Path, ours: re.Pattern[str]) -> None:
    """Removes what a killed process left unfinished directly under `folder`: what has one of `ours`
    behind `PARTIAL`. Any other is the user's."""
    for path in folder.glob(f"{PARTIAL}*"):
        if not ours.fullmatch(path.name.removeprefix(PARTIAL)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no such thing, whatever is in its place."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
        f"cannot write {path}: {reason}; free some space or fix its permissions, then run the "
        "same command again"
    )
