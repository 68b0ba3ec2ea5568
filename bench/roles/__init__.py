"""Roles: the child processes of a run, and their commands. No other package imports from here."""
