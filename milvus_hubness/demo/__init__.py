"""The demo: correct a real retriever, built from this machine's Python standard library."""
