"""Engines that many tests share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.engines import Engines
from tests.vllm.tensors.pairs import TensorPair

if TYPE_CHECKING:
    from tests.vllm.tensors.workers import Worker

SETTINGS: dict[str, dict[str, Any]] = {
    "put": {"async_scheduling": True},
    "put_async": {"kv_cache_dtype": "fp8_e4m3"},
    "get": {},
}
"""Of both engines, for each way to send."""
LAYERS = {"put": 1, "put_async": 3, "get": 4}
"""The engines have four."""
ON_DEVICE = {"put_async"}
"""Whose stores are memory of the engines' own."""


@pytest.fixture(scope="session", params=SETTINGS)
def shared_tensor_pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[TensorPair]:
    """Engines that send in one of the three ways. One D fails what does not come, the others compute it."""
    with closing(
        TensorPair(
            engines,
            request.param,
            more=SETTINGS[request.param],
            layers_per_tensor=LAYERS[request.param],
            store_on_device=request.param in ON_DEVICE,
        )
    ) as pair:
        pair.on_loss["D"] = "fail" if request.param == "put" else "recompute"
        yield pair


@pytest.fixture
def pair(shared_tensor_pair: TensorPair) -> Iterator[TensorPair]:
    """Both serve, and nothing is left of the test before. After it, nothing may be left either."""
    shared_tensor_pair.start()
    yield shared_tensor_pair
    shared_tensor_pair.at_rest()


@pytest.fixture
def worker() -> "Iterator[Callable[..., Worker]]":
    """Starts workers."""
    from tests.vllm.tensors.workers import Worker

    with ExitStack() as workers:

        def start(**options: Any) -> Worker:
            made = Worker(**options)
            workers.callback(made.side.close)
            return made

        yield start
