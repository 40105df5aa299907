"""Databases with corrected collections, behind one protocol."""
