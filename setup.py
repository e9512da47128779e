"""Builds the native allocator beside the package; everything else is in pyproject.toml."""

import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LIBRARY = "farspan.memory.libfarspan_memory"


class BuildNative(build_ext):
    """Runs CMake: the library is loaded by ctypes and knows nothing of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of an interpreter: any version of Python loads it."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """One target into the place where setuptools expects it."""
        if shutil.which("cmake") is None:
            raise RuntimeError("the native allocator needs CMake 3.20 or newer and g++")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "native"
        source = Path(__file__).resolve().parent / "native"
        configure = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
        subprocess.run(
            [*configure, f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}"], check=True
        )
        subprocess.run(["cmake", "--build", str(build), "--parallel", "2"], check=True)


setup(
    # Optional: planning and training need no compiler; what needs the library says that it lacks.
    ext_modules=[Extension(LIBRARY, sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
