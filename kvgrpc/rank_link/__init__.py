"""The process beside a worker whose lead is on another host: frames of a session on one side, ConnectRank on the other.

It decides nothing and keeps nothing. Each connection of the worker is one stream; the end of either is that of both.
"""
