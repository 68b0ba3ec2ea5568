"""World: what simulated hosts stand on: time, memory, network, movers and their faults."""
