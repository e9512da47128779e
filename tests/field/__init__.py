"""Situations from other people's bug reports: each is honoured, or named before the first step."""
