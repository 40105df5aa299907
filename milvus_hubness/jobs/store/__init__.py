"""What jobs need of a database: protocols, records, and who owns a helper collection."""
