"""Moves a cache: this is all that an engine on transformers adds to use kvgrpc.

Each layer's new keys and values are put as soon as the layer has computed them, so that they move while the next layers
compute. A prompt that is computed in chunks moves in as many parts.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from examples.transformers.model import compute, new_cache
from kvgrpc.engine.tensors import TensorStore


def digest_of(prompt: Sequence[int]) -> bytes:
    """Returns a digest that binds every tensor to the prompt that it was computed from."""
    return hashlib.sha256(repr(list(prompt)).encode()).digest()


class Sender:
    """Puts what each layer adds to a cache, as soon as it is computed."""

    def __init__(self, store: TensorStore, key: bytes, digest: bytes, to: str) -> None:
        self._store, self._key, self._digest, self._to = store, key, digest, to
        self.part = self.new_tokens = 0

    def layer_done(self, layer: int, cache: Any) -> None:
        """Puts a layer of the current part."""
        computed = cache.layers[layer]
        for name, tensor in (("k", computed.keys), ("v", computed.values)):
            new = tensor[:, :, -self.new_tokens :]
            to = [self._to]
            self._store.put_async(
                self._key, f"{layer}.{name}", new, to=to, part=self.part, layer=layer, content_digest=self._digest
            )


def prefill(model: Any, prompt: list[int], chunk: int, sender: Sender) -> int:
    """Computes a prompt and sends its cache, layer by layer and chunk by chunk. Returns the first token."""
    cache = new_cache(model)
    hooks = [
        layer.register_forward_hook(lambda *_, number=number: sender.layer_done(number, cache))
        for number, layer in enumerate(model.model.layers)
    ]
    token = -1
    for part, start in enumerate(range(0, len(prompt), chunk)):
        ids = prompt[start : start + chunk]
        sender.part, sender.new_tokens = part, len(ids)
        token = compute(model, cache, ids)
    for hook in hooks:
        hook.remove()
    return token


def receive(model: Any, store: TensorStore, key: bytes, prompt: list[int], chunk: int) -> Any:
    """Returns the cache of a prompt from another engine, which may still be computing it. Releases the request here
    when the cache is complete.
    """
    cache, digest = new_cache(model), digest_of(prompt)
    for layer in range(len(model.model.layers)):
        found = {}
        for name in ("k", "v"):
            parts = []
            for part in range(-(-len(prompt) // chunk)):
                with store.get(key, f"{layer}.{name}", part=part, layer=layer, content_digest=digest) as tensor:
                    parts.append(tensor.torch().clone())
            found[name] = torch.cat(parts, dim=2)
        cache.update(found["k"], found["v"], layer)
    store.release(key)
    return cache
