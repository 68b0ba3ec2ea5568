"""Paths on one host: shared memory, process memory (CMA), and windows."""
