"""A stand-in for SGLang's CUDA kernels: SGLang imports them also where it computes with torch alone."""

from collections.abc import Callable
from typing import Never


def __getattr__(name: str) -> Callable[..., Never]:
    """Returns a function that raises when it is called, for any name that SGLang imports."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Never:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
