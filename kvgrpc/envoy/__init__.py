"""Generated from proto/kvgrpc/envoy: change the .proto files and run `make gen`."""
