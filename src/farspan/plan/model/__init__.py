"""A configuration read as an architecture: a model without weights."""
