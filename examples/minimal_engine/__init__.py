"""A minimal LLM engine, small enough to read: moved KV gives the same tokens as KV computed here.

    paged.py   which blocks hold which tokens: block tables, references, prefix cache
    model.py   the transformer; reads and writes KV only through a block table

Importing this package imports neither torch nor a submodule.
"""
