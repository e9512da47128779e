"""Clock, power and temperature of a GPU while something is measured, as nvidia-smi reads them."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Sequence
from statistics import fmean
from threading import Thread

from benchmarks.children import Row

EVERY = 200  # milliseconds
QUERY = "clocks.sm,power.draw,temperature.gpu"
FORMAT = "--format=csv,noheader,nounits"
COMMAND = ("nvidia-smi", "-i", "0", f"--query-gpu={QUERY}", FORMAT, f"-lms={EVERY}")


class PowerLog:
    """Samples of the first GPU until `close`.

    Without nvidia-smi `works` is False and there are none.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._samples: list[tuple[float, float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        self.works = shutil.which(command[0]) is not None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._reader = Thread(target=self._read, daemon=True)
            self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # such as "[N/A]" of a card without a sensor
                clock, power, heat = map(float, line.split(","))
                self._samples.append((time.time(), clock, power, heat))

    def between(self, began: float, ended: float) -> Row | None:
        """What was read between two moments of time.time(); None where nothing was."""
        rows = [row for row in self._samples if began <= row[0] <= ended]
        if not rows:
            return None
        _, clocks, watts, heats = zip(*rows, strict=True)
        return {
            "samples": len(rows),
            "clock_mhz": round(fmean(clocks)),
            "least_clock_mhz": round(min(clocks)),
            "watts": round(fmean(watts)),
            "most_watts": round(max(watts)),
            "celsius": round(max(heats)),
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
