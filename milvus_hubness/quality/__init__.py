"""Measures of hubness and retrieval, tuning, and the verdict: numbers in, numbers out. It knows no database."""
