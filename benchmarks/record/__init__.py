"""The published record: numbers of papers as data, and what the planner says of the same runs."""
