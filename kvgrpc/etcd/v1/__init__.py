"""Generated from proto/kvgrpc/etcd/v1: change the .proto files and run `make gen`."""
