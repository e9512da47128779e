"""Files that are whole or not there, and a folder for this user alone."""

import hashlib
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from farspan_memory.errors import UnsupportedError

PARTIAL = ".partial-"  # before the name of a file that is not finished


class NotPrivate(OSError):
    """Another user owns a file or folder, or may write it; the message names it."""


def write_output(path: Path, content: str | bytes, option: str) -> None:
    """Write a file that the user named by `option`; an earlier one stays until the new one is
    whole. Raises UnsupportedError, naming the option."""
    # What names of files have that is no Unicode becomes a question mark.
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    partial = path.with_name(PARTIAL + path.name)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a terminal
            return
        partial.unlink(missing_ok=True)
        try:
            with partial.open("xb") as file:
                file.write(data)
            publish(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
    except OSError as error:
        raise UnsupportedError(
            f"{option}: {path} cannot be written: {error.strerror or error}; free some space, "
            "fix its permissions, or name another file"
        ) from error


def publish(partial: Path, path: Path) -> None:
    """Give a finished file its name once it is on the disk, replacing what has that name."""
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_folder(folder: Path) -> None:
    """Make `folder` for this user alone, or see that only this user may write there. Raises
    NotPrivate, and OSError where it cannot be made."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_foreign(folder)
    if is_open(folder):
        raise NotPrivate(
            f"others may write in {folder}; make it yours alone (chmod go-w), or remove it"
        )


def refuse_foreign(path: Path) -> None:
    """Raise NotPrivate unless `path` is this user's, and so is what it is a link to."""
    mine = os.geteuid()
    for owner in {path.lstat().st_uid, path.stat().st_uid} - {mine}:
        raise NotPrivate(f"{path} belongs to {_user(owner)}, and this is {_user(mine)}")


def is_open(path: Path) -> bool:
    """Whether others than its owner may write it."""
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
