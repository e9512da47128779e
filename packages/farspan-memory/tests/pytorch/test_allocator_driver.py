"""The driver is asked before anything is installed; each answer that ends it names its cause."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from farspan_memory.errors import UnsupportedError
from farspan_memory.pytorch import VIRTUAL_MEMORY, refuse_without_virtual_memory

# A driver of so many devices, the last of which may lack virtual memory management.
DRIVER = """
int cuInit(unsigned flags) { return flags == 0 ? INIT : 1; }
int cuDeviceGetCount(int* count) { *count = DEVICES; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 40; return 0; }
"""
ATTRIBUTE = """
int asked = 0;
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    asked += 1 << (device - 40);
    *value = device < 40 + ABLE;
    return attribute == 102 ? 0 : 1;
}
"""


def driver(folder: Path, source: str, **values: int) -> str:
    """A library with these functions."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is on PATH")
    code, made = folder / "driver.c", folder / "libdriver.so"
    code.write_text(source)
    defined = [f"-D{name}={value}" for name, value in values.items()]
    subprocess.run([compiler, "-shared", "-fPIC", *defined, str(code), "-o", str(made)], check=True)
    return str(made)


def test_devices_that_map_virtual_memory_pass(tmp_path: Path) -> None:
    library = driver(tmp_path, DRIVER + ATTRIBUTE, INIT=0, DEVICES=2, ABLE=2)
    refuse_without_virtual_memory(library)
    asked = ctypes.c_int.in_dll(ctypes.CDLL(library), "asked")
    assert asked.value == 0b11  # each device once


def test_a_device_without_it_is_named(tmp_path: Path) -> None:
    library = driver(tmp_path, DRIVER + ATTRIBUTE, INIT=0, DEVICES=2, ABLE=1)
    expected = rf"device 1 has no virtual memory management \(attribute {VIRTUAL_MEMORY}\)"
    with pytest.raises(UnsupportedError, match=expected):
        refuse_without_virtual_memory(library)


def test_no_device_is_refused(tmp_path: Path) -> None:
    library = driver(tmp_path, DRIVER + ATTRIBUTE, INIT=0, DEVICES=0, ABLE=0)
    with pytest.raises(UnsupportedError, match="shows no device; check CUDA_VISIBLE_DEVICES"):
        refuse_without_virtual_memory(library)


def test_a_driver_that_does_not_start_is_refused(tmp_path: Path) -> None:
    library = driver(tmp_path, DRIVER + ATTRIBUTE, INIT=100, DEVICES=1, ABLE=1)
    with pytest.raises(UnsupportedError, match="cuInit failed with error 100"):
        refuse_without_virtual_memory(library)


def test_a_driver_that_is_too_old_is_refused(tmp_path: Path) -> None:
    library = driver(tmp_path, DRIVER, INIT=0, DEVICES=1)
    with pytest.raises(UnsupportedError, match="has no cuDeviceGetAttribute; it is too old"):
        refuse_without_virtual_memory(library)


def test_no_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the CUDA driver does not load"):
        refuse_without_virtual_memory(str(tmp_path / "libcuda.so.1"))
