"""Stages: what is measured on. Two servers with their baselines, two engines, or two leads without processes.

`calls` and `hosts` are how a run reaches them, `processors` and `profiling` where their time goes.
"""
