"""Data path `collective`: both ranks act, the source's by sending, over a process group of torch.distributed."""
