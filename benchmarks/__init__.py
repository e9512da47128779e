"""Measurements, each a script that writes its numbers as data under `results/`."""
