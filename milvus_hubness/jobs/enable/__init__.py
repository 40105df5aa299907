"""Correction of a collection without a copy of it."""
