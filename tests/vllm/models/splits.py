"""Splits of a model over ranks, as arguments of vLLM."""

from typing import Any

ONE: dict[str, Any] = {}
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
EAGER = {"mode": 2, "backend": "eager"}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": EAGER}
"""Arguments of two pipeline stages. vLLM has no eager pipelines on processors."""
