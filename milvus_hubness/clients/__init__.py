"""What the clients of all databases have in common: none of it knows a database, or does I/O."""
