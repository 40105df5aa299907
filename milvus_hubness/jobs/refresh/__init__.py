"""Refresh: compute new biases for a corrected collection, and update online banks."""
