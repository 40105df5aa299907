"""Query banks: in memory, and in generations in the database."""
