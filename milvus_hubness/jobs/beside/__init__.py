"""Generations of biases beside the vectors: filled next to the one that searches read."""
