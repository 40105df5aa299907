"""Quality: measures of hubness and retrieval, tuning, diagnosis and reports."""
