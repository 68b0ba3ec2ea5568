"""The certificate authority of tests."""

from examples.certs import Authority, Name

__all__ = ["Authority", "Name"]
