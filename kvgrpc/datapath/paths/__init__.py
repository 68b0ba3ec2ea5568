"""Paths on one host: shared memory, and process memory (CMA)."""
