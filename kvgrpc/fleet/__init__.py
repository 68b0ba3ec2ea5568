"""The fleet: which engines there are, which of them may be used, and which two fit a request.

All of it is pure: `now` is an argument, and whoever talks to a registry or to an engine tells the directory what came
of it.
"""
