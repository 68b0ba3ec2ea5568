"""A server that a rogue is let loose on."""

from collections.abc import Iterator

import pytest

from tests.service.conftest import SETTINGS, SHARED
from tests.service.engines import Engine, ServeProcess
from tests.service.rogue import Rogue


@pytest.fixture(scope="module")
def victim_flags() -> tuple[str, ...]:
    """For files that want others."""
    return SHARED


@pytest.fixture(scope="module")
def victim_settings() -> str:
    """Likewise."""
    return SETTINGS


@pytest.fixture(scope="module")
def victim(
    tmp_path_factory: pytest.TempPathFactory, victim_flags: tuple[str, ...], victim_settings: str
) -> Iterator[Engine]:
    """The engine of a file that a rogue is let loose on."""
    engine = Engine(ServeProcess(tmp_path_factory.mktemp("victim"), *victim_flags, settings=victim_settings))
    yield engine
    engine.close()


@pytest.fixture
def rogue(victim: Engine) -> Iterator[Rogue]:
    """A peer of the victim's."""
    rogue = Rogue(victim)  # type: ignore[abstract]  # a rogue serves what its tests need
    yield rogue
    rogue.close()
    victim.reset()
