"""How far it is from the training loop to the attention kernel: what a reader has to follow.

    python -m benchmarks.walk            # frames of the third step, files and functions it runs
    python -m benchmarks.walk --files    # each file too

`farspan train` runs on the CPU for three steps of a tiny model, and the third one is profiled. Only
farspan's own frames are counted: those of torch and transformers between them are not.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import typer

import farspan
from farspan.cli.train import default_run
from farspan.cli.with_torch import train_and_tell
from farspan.data.config import DataConfig, SourceKind
from farspan.train.config import RunConfig
from farspan.train.observer import Reporter

SOURCE = Path(farspan.__file__).parent
LOOP = "TrainingLoop.fit"
STEP = "Step.__call__"
KERNEL = "scaled_dot_product"  # part of the name of torch's attention kernels
# At most: frames of the loop to the kernel, files of a step, and their lines.
MOST_FRAMES, MOST_FILES, MOST_LINES = 14, 30, 12_990


@dataclass
class Walker(Reporter):
    """A reporter that profiles one step of the run it is told of."""

    number: int = 3  # the two before it are looked at by the run itself
    codes: set[CodeType] = field(default_factory=set)  # farspan's functions that ran
    stack: list[str] = field(default_factory=list)  # of its frames, at the first kernel

    def begin(self, step: int) -> None:
        if step == self.number:
            sys.setprofile(self._profile)

    def end(self, values: Mapping[str, Any]) -> None:
        if values["step"] == self.number:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and is_own(code):
            self.codes.add(code)
        name = getattr(argument, "__name__", "") if event == "c_call" else code.co_name
        if not self.stack and KERNEL in name:
            self.stack = own_frames(frame)


def is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(str(SOURCE))


def own_frames(frame: FrameType | None) -> list[str]:
    """`file:function` of farspan's frames, outermost first."""
    found = []
    while frame is not None:
        if is_own(frame.f_code):
            place = Path(frame.f_code.co_filename).relative_to(SOURCE)
            found.append(f"{place}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def tiny_run(folder: Path) -> RunConfig:
    """Three steps of a small default run, in a folder."""
    (folder / "text.txt").write_text("a line of text\n" * 200, encoding="utf-8")
    run = default_run()
    return replace(
        run,
        data=DataConfig(
            source=SourceKind.TEXT,
            path=str(folder / "text.txt"),
            tokenizer="bytes",
            cache=str(folder / "cache"),
        ),
        folder=str(folder / "run"),
        steps=3,
        context=256,
        device="cpu",
        schedule=replace(run.schedule, chunk=64),
        optimizer=replace(run.optimizer, warmup=0),
    )


def walk() -> Walker:
    """What the third step of `farspan train` went through."""
    walker = Walker()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("farspan.cli.with_torch.make_reporter", return_value=walker),
        redirect_stdout(StringIO()),
    ):
        try:
            train_and_tell(tiny_run(Path(folder)), [], in_json=True)
        except typer.Exit as end:
            code = end.exit_code
        finally:
            sys.setprofile(None)
    assert code == 0
    return walker


def measure() -> dict[str, Any]:
    """Counts of frames, files, their lines, and functions, and the stack itself."""
    found = walk()
    names = [frame.partition(":")[2] for frame in found.stack]
    loop, step = names.index(LOOP), names.index(STEP)
    files = sorted({code.co_filename for code in found.codes})
    return {
        "frames_cli_to_step": step + 2,  # and the command, which calls the outermost of these
        "frames_loop_to_kernel": len(names) - loop,
        "files": len(files),
        "lines": sum(len(Path(file).read_text("utf-8").splitlines()) for file in files),
        "functions": len(found.codes),
        "stack": found.stack,
        "names": [str(Path(file).relative_to(SOURCE)) for file in files],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", action="store_true", help="print the files of a step too")
    arguments = parser.parse_args()
    found = measure()
    for frame in found["stack"]:
        print(f"  {frame}")
    print(f"frames from the command to the step: {found['frames_cli_to_step']}")
    loop, files = found["frames_loop_to_kernel"], found["files"]
    print(f"frames from the loop to the attention kernel: {loop} (aim: {MOST_FRAMES})")
    print(f"a step runs {files} files (aim: {MOST_FILES}), {found['functions']} functions")
    print(f"these files have {found['lines']:,} lines (aim: {MOST_LINES:,})")
    if arguments.files:
        print("\n".join(f"  {name}" for name in found["names"]))


if __name__ == "__main__":
    main()
