"""`python -m farspan`, which is what torchrun starts."""

from farspan.cli import main

if __name__ == "__main__":
    main()
