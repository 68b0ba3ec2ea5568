"""The pools of all leads with many peers: 64 blocks of 2 KiB."""

from kvgrpc.config import PoolConfig

POOL = PoolConfig(layers=2, kv_heads=1, head_dim=16, blocks=64)
FLAGS = ("--layers", "2", "--kv-heads", "1", "--head-dim", "16", "--blocks", "64")
