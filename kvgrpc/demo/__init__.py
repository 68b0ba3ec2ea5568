"""The demo: the whole job on real input. Two servers, a small transformer split across two engines, the same tokens as
one engine that does both, a conversation whose history goes back, and the trace of one request.
"""
