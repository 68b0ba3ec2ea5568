"""Servers with a planted defect in their node: a cancel with a certain message raises halfway through a change."""

from pathlib import Path
from typing import Any

from kvgrpc.core.events import CancelTransfer, LifeBegan
from kvgrpc.core.node import Node
from kvgrpc.server import Server
from tests.service.engines import ServeProcess

ROOT = Path(__file__).resolve().parents[2]
MESSAGE = "cancel me, and raise"
ONCE_MORE = "cancel me, raise, and raise when the next life begins"


class Defective(Node):
    """A node that raises on a cancel with a certain message."""

    begins_badly = 0

    def _make_handlers(self) -> Any:
        handlers = super()._make_handlers()
        (cancel,), (begin,) = handlers[CancelTransfer], handlers[LifeBegan]

        def raises(event: CancelTransfer) -> None:
            if event.message not in (MESSAGE, ONCE_MORE):
                cancel(event)
                return
            Defective.begins_badly = 2 * (event.message == ONCE_MORE)
            self.state.access.rows.clear()
            self.state.transfers.counts.clear()
            raise RuntimeError("planted")

        def begins(event: LifeBegan) -> None:
            if event.description is not None and Defective.begins_badly:
                Defective.begins_badly -= 1
                raise RuntimeError("planted once more")
            begin(event)

        return handlers | {CancelTransfer: (raises,), LifeBegan: (begins,)}


def plant() -> None:
    """Gives every later server of this process the defect."""
    Server.__init__.__defaults__ = (Defective,)


def python_path(folder: Path) -> str:
    """Returns the PYTHONPATH with which a new interpreter has the defect."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("from tests.service.defective import plant\n\nplant()\n")
    return f"{folder}:{ROOT}"


class DefectiveProcess(ServeProcess):
    """A `kvgrpc serve` with the defect. `defects` is the number that it must have logged at its end."""

    defects = 1

    def __init__(self, folder: Path, *flags: str, settings: str = "", **environment: str) -> None:
        planted = {"PYTHONPATH": python_path(folder / "planted")}
        super().__init__(folder, *flags, settings=settings, environment=environment | planted)

    def check_log(self) -> None:
        """Checks that the log has one line with one traceback for each defect, and no other failure."""
        assert self.log.count("Traceback") == self.log.count("a defect on ") == self.defects, self.log
        assert "could not" not in self.log, self.log
