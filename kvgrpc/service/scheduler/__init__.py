"""Scheduler: the policy of `kvgrpc.core.policy` behind SchedulerService."""
