"""What every job needs to write safely: the lease, its fencing aliases, batch records, write intents."""
