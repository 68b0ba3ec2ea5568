"""Generated from proto/kvgrpc/session/v1: change the .proto files and run `make gen`."""
