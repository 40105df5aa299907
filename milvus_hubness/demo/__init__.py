"""The demo: correct a real retriever that is built from this machine's own Python standard library."""
