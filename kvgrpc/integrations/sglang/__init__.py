"""The transfer back end kvgrpc of SGLang's disaggregated prefill, chosen by configuration only.

    python -m sglang.launch_server --disaggregation-mode prefill --disaggregation-transfer-backend kvgrpc ...

SGLang finds `plugin.register` by the entry point `sglang.srt.plugins`. Each attention-TP rank of SGLang runs a
scheduler of its own, and all of them decide alike. The first rank starts the engine's lead and speaks for all; each
rank attaches its memory as a `kvgrpc.engine.Rank`.

Decode reserves the pages of a prompt and names prefill's lead, which serves at SGLang's bootstrap address; prefill
hands its chunks over as parts of a push. So there is no bootstrap server, and no channel between the engines but gRPC.
"""
