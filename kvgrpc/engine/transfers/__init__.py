"""Transfers: their handles, the events about them, and which row of a session is about which handle. No I/O."""
