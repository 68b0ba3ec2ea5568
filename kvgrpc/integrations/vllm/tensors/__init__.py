"""`mode: "tensors"`: what a prompt leads to goes as named tensors, some layers at a time, into a store of the decode
engine, and from there into its blocks before the forward pass that needs it. No block is reserved for it beforehand.

Each worker has a store with a lead of its own (`kvgrpc.engine.tensors`: TensorStore), and rank n of one engine
exchanges tensors with rank n of the other one. The scheduler's side decides what is put, asked for and loaded, and
has no connection to a lead; both sides tell each other so in vLLM's own messages.

A tensor is the blocks of some layers that hold one part of the prompt. Parts have a fixed number of tokens, whatever
vLLM's steps compute at a time and whatever either engine has in its prefix cache, so that both sides know them.
"""
