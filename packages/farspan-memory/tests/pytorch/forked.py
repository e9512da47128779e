"""Programs of several seconds of imports, each in a process of its own, with one import for all.

    python -m tests.pytorch.forked

Reads a line for each run: a module's name and the path of its settings. The run is a fork, whose
output goes to files beside the settings; answers with its exit code. Nothing is computed here
before a fork: threads and forks do not go together.
"""

import gc
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from tests.pytorch import allocator_program, install_program

PROGRAMS = {made.__name__: made for made in (allocator_program, install_program)}


def run(program: ModuleType, settings: Path) -> int:
    """The exit code; negative for a signal."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(settings.with_name(name), os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = [program.__name__, str(settings)]
        program.main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    gc.freeze()  # or each fork's first collection looks at all that was imported
    for line in sys.stdin:
        name, settings = line.split()
        print(run(PROGRAMS[name], Path(settings)), flush=True)


if __name__ == "__main__":
    main()
