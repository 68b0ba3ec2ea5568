"""Plays the cases of `clients/conformance/cases` on real servers, through one executor of each language, and judges.

What a case and an executor are is in clients/conformance/README.md. Here is the runner only: it knows no language but
by `languages.toml`, and nothing of a client but what its executor answers.
"""
