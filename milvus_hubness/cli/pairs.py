"""Labelled pairs, for the commands that take --pairs."""

from milvus_hubness.jobs.pairs import read_pairs as read_pairs
