"""Copy loops that move bytes and checksum them."""
