"""What differs between versions of the libraries, and which ones the core tests ran with.

    python -m tests.versions oldest    run the core tests here, and record with what they passed
    python -m tests.versions newest
    python -m tests.versions page      the table of the records, into docs/reference/models.md

`make test-versions` makes an environment for each and does all of it.
"""

import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "models.md"
OPENING, CLOSING = "<!-- table versions -->", "<!-- end -->"
SHOWN = (
    *("torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors"),
    *("numpy", "typer", "rich", "psutil"),
)
# Families and refusals, hybrids, adapters, loading, steps, runs and Trainer: what asks something
# of a library whose versions differ.
CORE = (
    *(f"tests/hf/test_{name}.py" for name in ("families", "recurrent", "lora", "adapters", "load")),
    *(f"tests/hf/test_{name}.py" for name in ("text", "refused", "fused")),
    *(f"tests/engine/test_{name}.py" for name in ("exact", "documents")),
    *(f"tests/train/test_{name}.py" for name in ("lora", "hugging_face", "trl", "folder", "text")),
)


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def older(package: str, than: str) -> bool:
    """Is the installed one older? Not where there is none."""
    found = installed(package)
    return found is not None and Version(found) < Version(than)


# Rotary angles are products of matrices there, for which positions are kept as fp32 numbers.
FLOAT_POSITIONS = older("transformers", "5.19")
# GPT-J and CodeGen have an attention of their own there.
OWN_ATTENTION = older("transformers", "5.24")
# Triton 3.6 reads numbers in its interpreter in a way that NumPy refuses from 2.4 on.
CANNOT_INTERPRET = older("triton", "3.7") and not older("numpy", "2.4")


# -- which ones the core tests ran with ------------------------------------------------------------


class _Count:
    """What pytest's tests come to."""

    passed = skipped = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped


def run(name: str) -> int:
    """Run the core tests in this process and, if all pass, write down with what; exit status."""
    count = _Count()
    status = int(pytest.main(["-q", *(str(ROOT / path) for path in CORE)], plugins=[count]))
    if status == 0:
        records = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
        records[name] = {
            "date": datetime.now(UTC).date().isoformat(),
            "passed": count.passed,
            "skipped": count.skipped,
            "Python": platform.python_version(),
            **{package: installed(package) for package in SHOWN},
        }
        RECORD.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n", "utf-8")
    return status


def filled(text: str, records: dict[str, Any]) -> str:
    """The page with the table of the records in its place."""
    before, _, rest = text.partition(OPENING)
    names = [name for name in ("oldest", "newest") if name in records]
    rows = [["", *names], ["---"] * (1 + len(names))]
    for what in ("Python", *SHOWN):
        found = [records[name][what] for name in names]
        if any(found):
            rows.append([what, *(v.partition("+")[0] if v else "–" for v in found)])
    for what in ("passed", "date"):
        label = "core tests passed" if what == "passed" else what
        rows.append([label, *(str(records[name][what]) for name in names)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{before}{OPENING}\n\n{table}\n\n{rest[rest.index(CLOSING) :]}"


def main(name: str) -> int:
    if name != "page":
        return run(name)
    records = json.loads(RECORD.read_text("utf-8"))
    PAGE.write_text(filled(PAGE.read_text("utf-8"), records), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
