"""Copy: the loops that move bytes and sum them up."""
