"""Generated from proto/kvgrpc/envoy/v1: change the .proto files and run `make gen`."""
