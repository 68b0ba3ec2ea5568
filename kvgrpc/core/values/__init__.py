"""Values: what messages and memory are made of, and the arithmetic over them.

Frozen, without time: ids, limits, layouts, block lists, content, grants. What changes is in `tables`.
"""
