"""Roles: the child processes of a run, and what each can do. No other room imports from here."""
