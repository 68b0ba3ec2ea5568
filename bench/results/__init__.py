"""Results: the findings of runs, their targets, and their table."""
