"""What was planned and measured, for a person to read."""
