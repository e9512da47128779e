"""`farspan-plan`: `farspan plan` of the tree in this package's folder."""

import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Entry point. An installed `farspan`, if there is one, is neither used nor touched."""
    sys.path.insert(0, str(Path(__file__).with_name("tree")))
    if sys.argv[1:] == ["--version"]:
        print(f"farspan-plan {import_module('farspan.spec').VERSION}")
        return
    import_module("farspan.cli").main(import_module("farspan.cli.plan").app)


if __name__ == "__main__":
    main()
