"""The version, where the command line can read it without the package's face."""

VERSION = "0.1.0"
