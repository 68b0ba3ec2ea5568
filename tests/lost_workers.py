"""A worker of pytest-xdist that dies takes one test with it, and the run goes on to its end.

pytest-xdist 3.8 gives the replacement files that are done, or one test without a second behind it: the replacement then
waits for work and the run for the replacement, for ever. It also repeats the test that killed the worker.
"""

import faulthandler

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = 2
"""Number of tests that a worker needs: it begins one when it knows the next."""


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives files to workers, and those of a worker that died to the others."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Takes a worker out. Returns the test that it died in; None if it had none left."""
        work = self.assigned_work[node]
        died_in = next((test for tests in work.values() for test, done in tests.items() if not done), None)
        left = {
            file: {test: False for test, done in tests.items() if not done and test != died_in}
            for file, tests in work.items()
        }
        self.assigned_work[node] = {}
        super().remove_node(node)
        self.workqueue.update({file: tests for file, tests in left.items() if tests})
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def schedule(self) -> None:
        """Gives work to workers that have none, such as a replacement that has collected."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # a replacement that still collects
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= WAITING:
            super()._reschedule(node)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A worker that dies tells the stack of the thread that it died in, which dozens of other threads would hide."""
    if hasattr(config, "workerinput") and fault_handler_stderr_fd_key in config.stash:
        faulthandler.enable(config.stash[fault_handler_stderr_fd_key], all_threads=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile | None:
    """Returns the scheduler of `--dist loadfile`."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None
