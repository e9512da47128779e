"""Training: configuration, planning, optimizers, loggers and the loop."""
