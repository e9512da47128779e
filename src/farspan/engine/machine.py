"""What a number was measured on: it goes into every run folder and every result."""

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("transformers", "safetensors")


def machine() -> dict[str, Any]:
    """Hardware, versions and date."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        # Which CUDA torch is built for is a part of its version, and not of its package's.
        "versions": {"torch": torch.__version__} | {name: version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
