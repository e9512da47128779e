"""One step on several ranks: what each holds, computes and sends."""
