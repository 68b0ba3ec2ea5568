"""Access: what peers ask of this engine's blocks: OpenAccess, SettleAccess, CloseAccess, ChecksumBlocks.

Why the blocks are held is in `send` (leases) and `receive` (reservations).
"""
