"""A minimal LLM engine, small enough to read: moved KV gives the same tokens as KV computed here.

    engine.py  the engine on kvgrpc: blocks move by pull
    push.py    what push adds, whole prompts and layer by layer
    chat.py    what conversations add: history comes back from the engine that decoded
    ranks.py   its pool split over tensor-parallel ranks
    windows.py layers that see the last tokens only, in a group of their own
    paged.py   which blocks hold which tokens: block tables, references, prefix cache
    model.py   the transformer; reads and writes KV only through a block table

Importing this package imports neither torch nor a submodule.
"""
