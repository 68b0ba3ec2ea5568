"""Plays the cases of `clients/conformance/cases` on real servers, through one executor of each language, and judges
them.

clients/conformance/README.md explains cases and executors. This package is only the runner: it knows the languages only
from `languages.toml`, and a client only by the answers of its executor.
"""
