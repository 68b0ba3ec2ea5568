"""Measures: the work that is done on a stage, step by step, and its results."""
