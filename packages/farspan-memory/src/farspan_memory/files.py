"""Files that are written whole or not at all, and folders that only this user may write to."""

import hashlib
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from farspan_memory.errors import UnsupportedError

PARTIAL = ".partial-"  # before the name of an unfinished file


class NotPrivate(OSError):
    """Another user owns a file or folder, or may write to it; the message names the file."""


def write_output(path: Path, content: str | bytes, option: str) -> None:
    """Write the file that the user named by `option`. An existing file stays until the new file is
    complete. Raises UnsupportedError, naming the option."""
    # Bytes of file names that are not Unicode become question marks.
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
    """Flush a finished file to the disk, and rename it to `path`, replacing a file there."""
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
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_folder(folder: Path) -> None:
    """Make `folder` for this user alone; if it exists, check that only this user may write there.
    Raises NotPrivate, or OSError if it cannot be made."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_foreign(folder)
    if is_open(folder):
        raise NotPrivate(
            f"other users may write in {folder}; forbid that (chmod go-w), or remove it"
        )


def refuse_foreign(path: Path) -> None:
    """Raise NotPrivate unless this user owns `path` and, if it is a link, its target."""
    mine = os.geteuid()
    for owner in {path.lstat().st_uid, path.stat().st_uid} - {mine}:
        raise NotPrivate(
            f"{path} belongs to {_user(owner)}, but this process runs as {_user(mine)}"
        )


def is_open(path: Path) -> bool:
    """Return whether users other than the owner may write to a file or folder."""
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
