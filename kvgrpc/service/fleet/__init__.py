"""The fleet as a server sees it: it publishes itself in a registry, and reads the registry for others.

Nothing of it decides whether this engine serves: a registry that is down costs a line of the log and a metric.
"""
