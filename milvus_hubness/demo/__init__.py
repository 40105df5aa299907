"""A real retriever built from this machine's own Python standard library, to see the correction at work."""
