"""The schema that a server shows to tools: comments, which are the contract, included, and methods by name."""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, SourceCodeInfo

COMMENTS = Path(__file__).with_name("comments.binpb")
"""Made by `make gen`: name and comments of each file of the schema. Generated code leaves the comments out."""


class Schema:
    """A descriptor pool that finds methods too: `grpcurl describe Service.Method` asks for a method by its name."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileByName(self, name: str) -> Any:
        return _Commented(self._pool.FindFileByName(name))

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        return _Commented(self._containing(symbol))

    def _containing(self, symbol: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return self._pool.FindServiceByName(service).methods_by_name[method].containing_service.file


class _Commented:
    """The part of a file's descriptor that reflection uses."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @property
    def name(self) -> str:
        return str(self._file.name)

    @property
    def dependencies(self) -> list["_Commented"]:
        return [_Commented(file) for file in self._file.dependencies]

    def CopyToProto(self, proto: FileDescriptorProto) -> None:
        self._file.CopyToProto(proto)
        if self.name in _comments():
            proto.source_code_info.CopyFrom(_comments()[self.name])


@cache
def _comments() -> dict[str, SourceCodeInfo]:
    """Returns the comments by file name; reads them on the first call."""
    return {file.name: file.source_code_info for file in FileDescriptorSet.FromString(COMMENTS.read_bytes()).file}
