"""Kubernetes as a registry: engines behind a Service, by its EndpointSlices, and engines that publish a Lease."""
