"""What a machine without a network lacks to run `benchmarks.gpu.hour`, in a folder to take there.

    python -m benchmarks.gpu.pack build/gpu

The baseline's kernels (liger-kernel), four-bit weights (bitsandbytes, of which the libraries of one
CUDA release stay) and the allocator's library, built here. Packages are downloaded for Linux on
x86-64. At the end it lists what travels, the tracked files of the tree included, and fails where
that is more than `--limit`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from benchmarks.children import ROOT
from farspan.formatting import read_bytes
from farspan.host import MIB
from farspan_memory.native import LIBRARY

PACKAGES = ("liger-kernel==0.8.5", "bitsandbytes==0.50.2")
GLIBC = ("2_28", "2_27", "2_24", "2_17")
KEPT = ("cuda130", "cpu")  # of bitsandbytes' libraries, which take 125 MB together
LIMIT = "64MiB"


def download(folder: Path, python: str) -> None:
    """Wheels for Linux on x86-64."""
    platforms = (f"manylinux_{version}_x86_64" for version in GLIBC)
    asked = [part for name in (*platforms, "manylinux2014_x86_64") for part in ("--platform", name)]
    kind = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *kind, *asked, "-d", str(folder)]
    subprocess.run([*command, *PACKAGES], check=True, timeout=600)


def unpack(wheels: Path, folder: Path) -> None:
    """Packages as they are imported, without libraries that the machine has no use for."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with ZipFile(wheel) as archive:
            archive.extractall(folder)
    for library in folder.glob("bitsandbytes/*.so"):
        if not any(word in library.name for word in KEPT):
            library.unlink()
    if not LIBRARY.exists():
        sys.exit(f"farspan: {LIBRARY.name} is not built; `make .venv/.dev` builds it")
    shutil.copy(LIBRARY, folder / LIBRARY.name)


def listing(folder: Path) -> dict[str, int]:
    """Bytes of what travels: each part of the folder, and the tracked files of the tree."""
    parts = {
        path.name: sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
        for path in sorted(folder.iterdir())
    }
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return parts | {"tracked files": sum(f.stat().st_size for f in files if f.is_file())}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder to write, for `hour --site`")
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--limit", default=LIMIT, help="of all that travels")
    given = parser.parse_args()
    limit = read_bytes(given.limit, "limit")
    with tempfile.TemporaryDirectory() as wheels:
        download(Path(wheels), given.python)
        unpack(Path(wheels), given.folder)
    found = listing(given.folder)
    for name, size in found.items():
        print(f"{size / MIB:8.1f} MiB  {name}")
    total = sum(found.values())
    print(f"{total / MIB:8.1f} MiB  in all, of {limit / MIB:.0f}")
    if total > limit:
        sys.exit(f"farspan: limit: {total / MIB:.1f} MiB travel; take less along, or raise --limit")


if __name__ == "__main__":
    main()
