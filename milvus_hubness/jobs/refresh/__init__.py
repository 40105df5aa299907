"""Refresh: compute new biases for a corrected collection, and sample live queries."""
