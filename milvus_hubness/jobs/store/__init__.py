"""What jobs need of a database: the protocols, the records they exchange, and who owns a helper
collection.
"""
