"""Writes repositories.jsonl: each package of the standard library as one document.

python prepare.py [LARGEST bytes of a document]
"""

import json
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
LARGEST = 26_000  # bytes, about 8K tokens


def document(package: Path) -> str:
    """All files of a package, each below its name, those of a folder together."""
    root = package.parent
    files = [file for file in sorted(package.rglob("*.py")) if "test" not in file.parts]
    return "\n".join(f"# {file.relative_to(root)}\n{file.read_text('utf-8')}" for file in files)


def main(largest: int = LARGEST) -> None:
    """Packages that are larger are left out."""
    packages = sorted(Path(sysconfig.get_path("stdlib")).glob("*/__init__.py"))
    found = [document(init.parent) for init in packages]
    kept = [text for text in found if 1000 < len(text.encode()) <= largest]
    with (HERE / "repositories.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in kept)
    print(f"repositories.jsonl: {len(kept)} of {len(found)} packages")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
