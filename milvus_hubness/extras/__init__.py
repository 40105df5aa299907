"""What few need: QuARI."""
