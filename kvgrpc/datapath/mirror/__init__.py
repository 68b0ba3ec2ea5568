"""Memory that no data path reaches, and its mirror in host memory, which all of them reach."""
