"""Processes that share one run."""
