"""What moved, by the counts of those that it moved between."""

from tests.vllm.engines import Engine


def received(engine: Engine) -> int:
    """Tokens whose KV came from elsewhere, so far."""
    return engine.counts().get("received_tokens", 0)


def moved(engine: Engine) -> dict[str, int]:
    """Bytes of each transfer that its lead remembers."""
    with engine.lead() as lead:
        return {row.transfer_id: row.moved_bytes for row in lead.list_transfers().transfers}


def moved_since(engine: Engine, known: dict[str, int]) -> list[int]:
    """Bytes of each transfer that is not `known`, and brought any."""
    return [nbytes for name, nbytes in moved(engine).items() if name not in known and nbytes]
