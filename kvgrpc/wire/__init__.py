"""Protobuf to core and back. No gRPC: shared by the service, the session and the engine's library.

Here ends everything that is wrong in form: what leaves `kvgrpc.wire` towards the core has every field in its type and
range; whether it makes sense is the core's to say. Errors name the field by its path in the request.
"""
