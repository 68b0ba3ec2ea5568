"""Immutable values, and the arithmetic over them: ids, limits, layouts, block lists, content and grants.

None of them knows the time. State that changes is in `tables`.
"""
