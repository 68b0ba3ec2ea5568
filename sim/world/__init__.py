"""The surroundings of simulated hosts: time, memory, network, movers and their faults."""
