"""Generated from proto/kvgrpc/peer: change the .proto files and run `make gen`."""
