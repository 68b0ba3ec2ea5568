"""Adapters for engines of other projects. Each imports its engine only when it is used."""
