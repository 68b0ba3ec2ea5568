"""Generated from proto/kvgrpc/session: change the .proto files and run `make gen`."""
