"""SchedulerService for an engine's scheduler: its hooks as calls, as steps of many calls, and as a stream of steps."""

from kvgrpc.client.scheduler import step_calls
from kvgrpc.client.scheduler.scheduler import Scheduler, Step, refusal

__all__ = ["Scheduler", "Step", "refusal", "step_calls"]
