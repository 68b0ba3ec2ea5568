"""SchedulerService for an engine's scheduler: its hooks as calls, and its steps of many calls over a stream."""

from kvgrpc.client.scheduler import step_calls
from kvgrpc.client.scheduler.scheduler import Scheduler, refusal

__all__ = ["Scheduler", "refusal", "step_calls"]
