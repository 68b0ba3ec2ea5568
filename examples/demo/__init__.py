"""The demo: the whole job on real input. It runs two servers and a small transformer split across two engines, compares
the tokens with those of one engine, returns a conversation's history to P, and shows the trace of one request.
"""
