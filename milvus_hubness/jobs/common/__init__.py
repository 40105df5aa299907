"""The parts that all jobs share."""
