"""NIXL: the path between hosts and devices, through one agent a rank."""
