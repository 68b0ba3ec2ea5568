"""Results: what runs found, what it is to reach, and the table of it."""
