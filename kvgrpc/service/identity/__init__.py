"""Identity: who calls, in which roles and for which tenant, and whether the caller may call a method.

The gate asks the other files: names of certificates, tokens, the table of roles, the files that an operator writes.
What a caller may do with one thing is decided by the core (`kvgrpc/core/values/owners.py`).
"""
