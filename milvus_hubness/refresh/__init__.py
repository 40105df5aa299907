"""Refresh: new biases for a corrected collection, and the updates of online banks."""
