"""`mode: "tensors"`: a prompt's KV goes as named tensors, some layers at a time, into the decode engine's store. From
there it is copied into blocks before the forward pass that needs it. No block is reserved for it beforehand.

Each worker has a store with a lead of its own (`kvgrpc.engine.tensors`: TensorStore). Rank n of one engine exchanges
tensors with rank n of the other engine. The scheduler's side decides what is put, asked for and loaded, and has no
connection to a lead. The two sides talk through vLLM's own messages.

A tensor is the blocks of some layers that hold one part of the prompt. Parts have a fixed number of tokens, whatever
vLLM's steps compute and whatever either engine has in its prefix cache, so that both engines know the parts.
"""
