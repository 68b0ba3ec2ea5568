"""Access: what peers do with this engine's blocks (OpenAccess, SettleAccess, CloseAccess, ChecksumBlocks, PostSend),
and CancelTransfer.

`send` (leases) and `receive` (reservations) say why the blocks are held.
"""
