"""What the CUDA driver says before anything of CUDA starts: does a device map virtual memory?"""

import ctypes

from farspan.spec import Refused

DRIVER = "libcuda.so.1"
VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def refuse_without_virtual_memory(library: str = DRIVER) -> None:
    """Asks every visible device; starts the driver, but no device. Raises Refused."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise Refused(
            f"allocator: the CUDA driver does not load ({error}); it comes with the GPU's driver"
        ) from error
    _ask(driver, "cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    _ask(driver, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise Refused("allocator: the CUDA driver shows no device; see CUDA_VISIBLE_DEVICES")
    for ordinal in range(count.value):
        device, able = ctypes.c_int(), ctypes.c_int()
        _ask(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        _ask(driver, "cuDeviceGetAttribute", ctypes.byref(able), VIRTUAL_MEMORY, device)
        if not able.value:
            raise Refused(
                f"allocator: device {ordinal} has no virtual memory management (attribute "
                f"{VIRTUAL_MEMORY}), which stitching is made of; keep PyTorch's own allocator there"
            )


def _ask(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        status = getattr(driver, name)(*arguments)
    except AttributeError as error:
        raise Refused(f"allocator: the CUDA driver has no {name}; it is too old") from error
    if status:
        raise Refused(f"allocator: the CUDA driver answers {name} with error {status}")
