"""Stages: what a run measures on. They are two servers with their baselines, two engines, or two leads in one process.

A run reaches them through `calls` and `hosts`. `processors` and `profiling` show where their time goes.
"""
