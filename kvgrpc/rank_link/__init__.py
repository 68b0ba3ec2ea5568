"""The process beside a worker whose lead is on another host: session frames on one side, ConnectRank on the other.

It decides nothing and keeps nothing. Each connection of the worker is one stream; the end of one ends the other.
"""
