"""Generated from proto/kvgrpc/v1: change the .proto files and run `make gen`."""
