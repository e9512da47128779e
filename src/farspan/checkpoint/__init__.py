"""Checkpoints of a run, by one process or by many ranks, and the model exported at its end."""
