"""Measures of hubness and retrieval, tuning, and the verdict: numbers in, numbers out.

It knows no database. `measures` is what the others compute with. `trials` fits and searches,
`tuning` chooses among the trials with labels, `verdict` decides without. `recall` is the gate of a
migration, `bank_checks` and `groups` are figures of reports.
"""
