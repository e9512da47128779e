"""Which schedule to run: bounds of many at once, and the search among them."""
