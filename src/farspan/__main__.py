"""Entry point of `python -m farspan`, which torchrun starts."""

from farspan.cli import main

if __name__ == "__main__":
    main()
