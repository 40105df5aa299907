"""What every storey uses: limits, defaults, texts, logs, waits, and files of vectors and tables."""
