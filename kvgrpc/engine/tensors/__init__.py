"""Named tensors for engines without blocks: an engine puts them into stores of others, and gets them from its own.

    store = TensorStore.launch(store_bytes=1 << 30)            # in the process that has the tensors
    store.put(key, "layers.0.k", tensor, to=[address])         # returns when the other engine has it
    pending = store.put_async(key, "layers.1.k", tensor, to=[address])
    store.wait_for_saved()                                     # the tensors may be overwritten from here on
    new = store.empty((8, 128), "float32")                     # computed in the store, and put without a copy
    store.put(key, "layers.2.k", new, to=[address])
    with store.get(key, "layers.0.k") as there: use(there.torch())     # at the other engine, in any order

Each store has one thread, which speaks to the lead and copies tensors into the store. The methods of a store may be
called from any thread.
"""

from kvgrpc.engine.tensors.jobs import PendingPut
from kvgrpc.engine.tensors.store import TensorStore
from kvgrpc.engine.tensors.stored import NewTensor, StoredTensor

__all__ = ["NewTensor", "PendingPut", "StoredTensor", "TensorStore"]
