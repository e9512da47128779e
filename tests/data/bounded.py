"""Calls in a child of this process, which the kernel ends beyond limits of time and memory."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path


def bounded(call: Callable[[], object], seconds: float, memory: int) -> str:
    """Return the error of a call, as "Type: words", and "" without one.

    Args:
        call: what the child runs.
        seconds: the most CPU seconds that it may take.
        memory: the most bytes that it may map beyond those of the start.
    """
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
            limit = pages * resource.getpagesize() + memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            call()
        except BaseException as error:
            os.write(here, f"{type(error).__name__}: {error}".encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(here)
    with os.fdopen(there) as words:
        found = words.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"ended by signal {-status}"
    return found
