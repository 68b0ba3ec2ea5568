"""Splits of a model over ranks, as arguments of vLLM."""

from typing import Any

ONE: dict[str, Any] = {}
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"},
}  # fmt: skip
"""Arguments of two pipeline stages. vLLM has no eager pipelines on processors."""
