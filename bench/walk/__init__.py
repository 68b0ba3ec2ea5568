"""The Python calls and files that a request enters in the servers, and the size of the code."""
