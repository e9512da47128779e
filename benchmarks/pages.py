"""Writes what the results say into the pages of the documentation.

python -m benchmarks.pages [NAME ...]
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import cluster, fit, performance, post_training, readme
from benchmarks.peers import page as peers
from benchmarks.ranks import measure as ranks
from benchmarks.record import page as record
from benchmarks.tables import DOCS, ROOT, load, write

# By the name of a result file: the page, and what makes its tables by the names of their places.
PAGES: dict[str, tuple[Path, Callable[[], dict[str, str]]]] = {
    "readme": (ROOT / "README.md", lambda: readme.tables(load("readme"))),
    "index": (DOCS / "index.md", lambda: readme.tables(load("readme"))),
    "fit": (DOCS / "tutorials/will-it-fit.md", lambda: fit.commands_shown(load("fit"))),
    "longest": (
        DOCS / "evidence/longest-contexts.md",
        lambda: fit.tables(load("fit")) | cluster.tables(load("cluster")),
    ),
    "post_training": (
        DOCS / "how-to/post-training.md",
        lambda: post_training.tables(load("post_training")),
    ),
    "performance": (DOCS / "evidence/performance.md", performance.tables),
    "record": (DOCS / "evidence/record.md", lambda: record.tables(record.all_cells())),
    "ranks": (DOCS / "evidence/several-gpus.md", lambda: ranks.tables(load("ranks"))),
    "peers": (DOCS / "explanation/comparison.md", lambda: peers.tables(load("peers"))),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PAGES, []], help="these pages alone")
    for name in parser.parse_args().names or PAGES:
        page, tables = PAGES[name]
        write(page, tables())
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
