"""kvgrpc moves KV-cache blocks between LLM engines, as a gRPC microservice."""

__all__ = ["__version__"]

__version__ = "0.1.0"
