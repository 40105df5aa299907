"""What few need: QuARI, and galleries on a Ray cluster."""
