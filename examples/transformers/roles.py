"""Runs the two processes. Each has the model and a store with its own lead."""

import random
from multiprocessing.connection import Connection

from examples.transformers.model import VOCAB, decode, make_model
from examples.transformers.moving import Sender, digest_of, prefill, receive
from kvgrpc.engine.tensors import TensorStore

PROMPT = [random.Random(7).randrange(VOCAB) for _ in range(300)]  # noqa: S311 - a prompt is no secret
CHUNK = 128
TOKENS = 24
STORE_BYTES = 16 << 20


def prefill_process(pipe: Connection) -> None:
    """Runs the prefill side: receives key and address, and sends the first token."""
    with TensorStore.launch(store_bytes=STORE_BYTES) as store:
        model = make_model()
        pipe.send(store.address)
        key, address = pipe.recv()
        pipe.send(prefill(model, PROMPT, CHUNK, Sender(store, key, digest_of(PROMPT), address)))
        store.wait_for_saved()  # the model's cache may be overwritten from here on
        pipe.recv()  # the other engine has the tensors


def decode_process(pipe: Connection) -> None:
    """Runs the decode side: receives key and first token, and sends all tokens."""
    with TensorStore.launch(store_bytes=STORE_BYTES) as store:
        model = make_model()
        pipe.send(store.address)
        cache = receive(model, store, pipe.recv(), PROMPT, CHUNK)
        pipe.send(decode(model, cache, pipe.recv(), TOKENS))
