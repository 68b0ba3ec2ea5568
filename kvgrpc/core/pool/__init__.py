"""Pool: blocks that this server gives out itself, and blocks in quarantine.

`tables.pins` says which blocks are pinned, and why.
"""
