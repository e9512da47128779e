"""Benchmarks of page-sparse attention."""
