"""Adapters for engines that other people wrote. Each imports its engine only when it is used."""
