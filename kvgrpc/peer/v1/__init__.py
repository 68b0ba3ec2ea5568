"""Generated from proto/kvgrpc/peer/v1: change the .proto files and run `make gen`."""
