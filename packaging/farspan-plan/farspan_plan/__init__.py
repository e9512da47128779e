"""The command `farspan plan` by itself. As a library, use `farspan`."""
