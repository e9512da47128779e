"""Training: configuration, optimizer, checkpoints and the loop."""
