"""Kubernetes' inference gateway: Envoy asks `kvgrpc fleet` to which engine an HTTP request goes."""
