"""A server that a rogue attacks."""

from collections.abc import Iterator

import pytest

from tests.service.conftest import SETTINGS, SHARED
from tests.service.engines import Engine, ServeProcess
from tests.service.rogue import Rogue


@pytest.fixture(scope="module")
def victim_flags() -> tuple[str, ...]:
    """Returns the victim's flags. A file overrides this fixture for others."""
    return SHARED


@pytest.fixture(scope="module")
def victim_settings() -> str:
    """Returns the victim's settings. A file overrides this fixture for others."""
    return SETTINGS


@pytest.fixture(scope="module")
def victim(
    tmp_path_factory: pytest.TempPathFactory, victim_flags: tuple[str, ...], victim_settings: str
) -> Iterator[Engine]:
    """Yields the engine that a file's rogues attack."""
    engine = Engine(ServeProcess(tmp_path_factory.mktemp("victim"), *victim_flags, settings=victim_settings))
    yield engine
    engine.close()


@pytest.fixture
def rogue(victim: Engine) -> Iterator[Rogue]:
    """Yields a rogue that is the victim's peer."""
    rogue = Rogue(victim)  # type: ignore[abstract]  # a rogue serves what its tests need
    yield rogue
    rogue.close()
    victim.reset()
