"""Servers for tests about one deed; see test_matrix.py for all of them."""

from tests.service.conftest import start

__all__ = ["start"]
