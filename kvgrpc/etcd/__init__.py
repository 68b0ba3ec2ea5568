"""Generated from proto/kvgrpc/etcd: change the .proto files and run `make gen`."""
