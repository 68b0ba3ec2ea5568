"""A model whose tokens have one latent vector each for all heads."""

from pathlib import Path

from tests.vllm.engines import VOCABULARY


def write_model(folder: Path) -> None:
    """Writes a DeepSeek V3 without experts, with random weights and the one latent size that vLLM has kernels for."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, first_k_dense_replace=3, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=64, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, initializer_range=0.08,
        tie_word_embeddings=False,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
