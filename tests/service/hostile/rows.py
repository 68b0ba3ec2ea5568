"""Bodies of requests with millions of empty rows."""


def rows_of(kind: type, field: str, count: int = 2_000_000) -> bytes:
    number: int = kind.DESCRIPTOR.fields_by_name[field].number  # type: ignore[attr-defined]
    return bytes([number << 3 | 2, 0]) * count
