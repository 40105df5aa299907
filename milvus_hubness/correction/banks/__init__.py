"""Query banks: in memory, online, and in generations in the database."""
