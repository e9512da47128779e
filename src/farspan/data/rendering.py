"""Chats are read in a process of their own.

A chat template is a program that came with a tokenizer: it may never end, or write more than
memory holds, and Jinja's sandbox limits neither. A child, forked once for all records of a source,
runs it under limits that the kernel keeps, in the midst of a single operation too. The child ends
there, and an error says at which record.
"""

import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from farspan.data.formats import ChatForm
from farspan.data.tokenizers import Document, Encoded, Form, Written
from farspan.spec import UnsupportedError

CPU_SECONDS = 1.5  # for a record; an honest one takes a thousandth
MEMORY = 512 << 20  # bytes above those of the process when it is forked
_PATIENCE = 300.0  # seconds until a child that does not even compute is given up

Content = Written | Encoded | None
Read = Callable[[Document], Content]


@contextmanager
def reading(form: Form) -> Iterator[Read]:
    """`form.read`, in a child where that runs a template. It raises UnsupportedError at a record
    for which the template takes more than CPU_SECONDS or MEMORY."""
    if not isinstance(form, ChatForm):
        yield form.read
        return
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that other threads hold; the child takes none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            ours.close()
            _serve(form.read, theirs)
        finally:
            os._exit(1)
    theirs.close()
    try:
        yield partial(_ask, child, ours)
    finally:
        ours.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _ask(child: int, pipe: Connection, document: Document) -> Content:
    try:
        pipe.send(document)
        if not pipe.poll(_PATIENCE):
            os.kill(child, signal.SIGKILL)
        answer: Content | Exception = pipe.recv()
    except (EOFError, OSError):
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        how = f"ended the process that reads it (status {status})"
        if status == -signal.SIGPROF:
            how = f"takes more than {CPU_SECONDS} s of CPU"
        answer = UnsupportedError(
            f"{document.place}: the chat template {how}; leave this record out, or give another "
            "data.chat_template"
        )
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(read: Read, pipe: Connection) -> None:
    """Answers until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent decides
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)  # of the last: it ends the process
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    place = "a record"
    while True:
        try:
            document = pipe.recv()
            place = document.place
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            answer: Content | Exception = read(document)
        except EOFError:
            return
        except MemoryError:
            answer = UnsupportedError(
                f"{place}: the chat template needs more than {MEMORY >> 20} MiB; leave this record "
                "out, or give another data.chat_template"
            )
        except Exception as error:
            answer = error
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(answer)
