"""What rewrites rows, on any store: migrations, refreshes, and corrections in place."""
