"""Hugging Face transformers in two processes: one prefills, the other decodes, and the cache moves between them as
named tensors, layer by layer while the prefill computes.

    python -m examples.transformers        prints the tokens of both, and of one process alone
"""
