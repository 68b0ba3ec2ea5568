"""Memory of GPUs, read by peers on the same host through read-only mappings of file descriptors."""
