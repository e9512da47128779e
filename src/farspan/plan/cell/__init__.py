"""What one cell holds for a moment: layers written on tensors without elements."""
