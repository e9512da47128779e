"""Builds the native allocator beside the package, and names the wheel; everything else is in
pyproject.toml."""

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

LIBRARY = "farspan_memory.libfarspan_memory"


class BuildNative(build_ext):
    """Runs CMake: the library is loaded by ctypes and knows nothing of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of an interpreter: any version of Python loads it."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """One target into the place where setuptools expects it."""
        if shutil.which("cmake") is None:
            raise CompileError("the native allocator needs CMake 3.20 or newer and g++")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "native"
        source = Path(__file__).resolve().parent / "native"
        configure = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
        configure.append(f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}")
        for command in (configure, ["cmake", "--build", str(build), "--parallel", "2"]):
            if subprocess.run(command).returncode:
                raise CompileError(f"{' '.join(command)} failed")


class Wheel(bdist_wheel):
    """For any Python 3, and every glibc that has what the library asks for."""

    def get_tag(self) -> tuple[str, str, str]:
        """Such as py3-none-manylinux_2_34_x86_64."""
        _, _, platform = super().get_tag()
        library = Path(self.get_finalized_command("build_ext").get_ext_fullpath(LIBRARY))
        found = re.findall(
            rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes() if library.exists() else b""
        )
        if found and platform.startswith("linux_"):
            major, minor = max((int(major), int(minor)) for major, minor in found)
            platform = f"manylinux_{major}_{minor}_{platform.removeprefix('linux_')}"
        return "py3", "none", platform


setup(
    # Optional: traces need no compiler; what needs the library says that it lacks.
    ext_modules=[Extension(LIBRARY, sources=[], optional=True)],
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildNative},
)
