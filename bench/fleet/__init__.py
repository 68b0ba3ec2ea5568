"""A fleet of many engines on a real etcd, and what it costs those who read it."""
