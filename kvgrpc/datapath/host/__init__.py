"""Host: memory that other processes can map, and how a process is proved to be itself."""
