"""Every test here starts processes of its own: its rule is about what happens between them."""

from tests.service.conftest import start

__all__ = ["start"]
