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
"""Settings of both engines, for each way to send."""
LAYERS = {"put": 1, "put_async": 3, "get": 4}
"""Layers per tensor, for each way to send. The engines have four layers."""
ON_DEVICE = {"put_async"}
"""Ways to send whose stores are in the engines' own memory."""


@pytest.fixture(scope="session", params=SETTINGS)
def shared_tensor_pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[TensorPair]:
    """Yields engines that send in one of three ways. One D fails what does not come, the others compute it."""
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
    """Yields a running pair with nothing left of earlier tests. The test may leave nothing either."""
    shared_tensor_pair.start()
    yield shared_tensor_pair
    shared_tensor_pair.at_rest()


@pytest.fixture
def worker() -> "Iterator[Callable[..., Worker]]":
    """Yields a function that starts workers."""
    from tests.vllm.tensors.workers import Worker

    with ExitStack() as workers:

        def start(**options: Any) -> Worker:
            made = Worker(**options)
            workers.callback(made.side.close)
            return made

        yield start
