"""Conversion between Protobuf messages and core values, without gRPC.

All checks of form are here: every field that leaves `kvgrpc.wire` towards the core has its type and range. The core
decides if the values make sense. Errors name the field by its path in the request.
"""
