"""Transfers: handles, their events, and the table that maps rows of a session to handles. No I/O."""
