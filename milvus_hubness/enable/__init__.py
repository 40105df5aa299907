"""Correction without a copy."""
