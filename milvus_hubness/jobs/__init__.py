"""What rewrites rows, on any store: migrations, refreshes, corrections in place, and what they
share.
"""
