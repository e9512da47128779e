"""Files of a checkpoint, read back or refused by name."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from farspan.spec import Refused


def expect_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises Refused when there is no such thing."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(f"{path}: expected a JSON object")
    return value


def open_tensors(path: Path) -> Any:
    """A safetensors file, to be entered. Raises Refused where it is none."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Refused(f"{path}: not a safetensors file: {error}") from error
