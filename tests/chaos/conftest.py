"""Servers for tests of a single fault; test_matrix.py covers the whole matrix."""

from tests.service.conftest import start

__all__ = ["start"]
