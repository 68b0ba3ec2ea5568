"""Host memory that other processes can map, and proofs of a process's identity."""
