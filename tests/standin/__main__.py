"""`python -m tests.standin COMMAND...`: builds the stand-in where it is not built; runs COMMAND."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILT = ROOT / "build" / "standin"
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
NEEDED = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")  # of the toolkit
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC")
# NCCL's header asks for types of few bits, whose headers ask for more of a toolkit than pip brings.
LEFT_OUT = ("-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__", "-D__CUDA_FP8_H__")
COLLECTIVES = "libcollectives.so"
OPERATORS = "liboperators.so"
LIBRARIES = {
    "libruntime.so": ("runtime.cpp",),
    "libcuda.so.1": ("driver.cpp", "refused.cpp"),
    COLLECTIVES: ("collectives.cpp",),
    OPERATORS: ("operators.cpp",),
}
PRELOADED = ("libruntime.so", COLLECTIVES)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("standin: expected a command to run")
    if torch.version.cuda is None:
        sys.exit(f"standin: PyTorch {torch.__version__} is built without CUDA; install one with it")
    for header in NEEDED:
        if not any((place / header).exists() for place in _toolkit()):
            sys.exit(
                f"standin: no {header} of CUDA's toolkit in {CUDA}; set CUDA_HOME to where it is "
                "(Triton's wheel brings what pip's nvidia/cu13 leaves out)"
            )
    BUILT.mkdir(parents=True, exist_ok=True)
    for library, sources in LIBRARIES.items():
        _build(BUILT / library, [HERE / source for source in sources])
    os.execvpe(sys.argv[1], sys.argv[1:], _environment())


def _build(library: Path, sources: list[Path]) -> None:
    if library.exists() and library.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return
    torch_place = Path(torch.__file__).parent
    headers = [*_toolkit(), torch_place / "include"]
    headers += [torch_place / "include/torch/csrc/api/include"]
    headers += [nccl / "include" for nccl in _places("nvidia.nccl")]
    linked = ["-ldl"]
    if library.name == OPERATORS:
        linked += [f"-L{torch_place}/lib", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
        linked += [f"-Wl,-rpath,{torch_place}/lib"]
    flags = [*FLAGS, *(f"-I{place}" for place in headers)]
    flags += LEFT_OUT if library.name == COLLECTIVES else ()
    subprocess.run(["g++", *flags, *map(str, sources), *linked, "-o", str(library)], check=True)


def _toolkit() -> list[Path]:
    """Where its headers are; Triton brings those that pip's nvidia/cu13 leaves out."""
    return [CUDA, *(place / "backends/nvidia/include" for place in _places("triton"))]


def _places(package: str) -> list[Path]:
    found = find_spec(package)
    places = found.submodule_search_locations if found is not None else None
    return [Path(place) for place in places or ()]


def _environment() -> dict[str, str]:
    sources = ROOT / "src", ROOT / "packages" / "farspan-memory" / "src"
    paths = [HERE / "site", *sources, ROOT, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join([str(BUILT), os.environ.get("LD_LIBRARY_PATH", "")]),
        "LD_PRELOAD": " ".join(str(BUILT / name) for name in PRELOADED),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "STANDIN_OPERATORS": str(BUILT / OPERATORS),
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
    }


if __name__ == "__main__":
    main()
