"""Scheduler: decides what to take, give and keep, for an engine's scheduler in Python."""

from kvgrpc.core.policy.spec import Offer, Source
from kvgrpc.engine.scheduler.request import ScheduledRequest
from kvgrpc.engine.scheduler.scheduler import TAKEN_BACK_S, Scheduler

__all__ = ["TAKEN_BACK_S", "Offer", "ScheduledRequest", "Scheduler", "Source"]
