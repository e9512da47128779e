"""What a program takes on a machine: bytes by part, seconds by lane, for one device of many."""
