"""The cases of the conformance suite, by the servers that they need."""

from clients.conformance.kvgrpc_conformance.cases import load

SUITE = load()
COMMON = next(case.group for case in SUITE if not case.own and case.servers == {"P": {}, "D": {}})
SHARED = [case for case in SUITE if case.group == COMMON and not case.own]
"""Cases that all share two servers."""
OTHERS = sorted((case for case in SUITE if case not in SHARED), key=lambda case: (case.group, case.own))
"""Cases with servers of their own, or with other settings."""
