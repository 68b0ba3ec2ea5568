"""Session: the socket on which this lead's own engine and its workers speak to it."""
