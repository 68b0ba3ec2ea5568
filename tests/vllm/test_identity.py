"""Nobody gets KV of other weights or of another tenant, whatever the names say."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvgrpc.integrations.vllm.identity import (
    CACHE_BESIDES,
    MODEL_BESIDES,
    MULTIMODAL_BESIDES,
    Kernels,
    factors_of,
    identity_of,
    kernels_of,
)
from kvgrpc.integrations.vllm.options import BlockOptions
from tests.vllm.cores import PROMPT, Core, Cores, request_of
from tests.vllm.engines import PREFILL, Pair, prompt_of, pushed, wait_until

KEY = b"k" * 16


def adapter_in(folder: Path, weights: bytes, suffix: str = "safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / f"adapter_model.{suffix}").write_bytes(weights)
    return folder


def lora(folder: Path, name: str = "adapter", number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder), **more)


def comes(d: Core, params: dict[str, Any], **fields: Any) -> bool:
    """Checks that D loads what P offers."""
    request = request_of("d", params, **fields)
    blocks = d.begin(request)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    lost = d.told.failed == {"d"}
    touched = any(bool(layer[blocks].any()) for layer in d.memory.values())
    assert touched is not lost
    return not lost


def test_an_adapter_is_known_by_its_files_whatever_its_name_is(in_order: Cores, tmp_path: Path) -> None:
    p, d = in_order
    here, there = adapter_in(tmp_path / "here", b"same"), adapter_in(tmp_path / "there", b"same")
    (there / "README.md").write_text("no weights")
    assert comes(d, p.prefilled("p", lora_request=lora(here)), lora_request=lora(there, "other", 7))


@pytest.mark.parametrize("takes_with_one", [True, False])
def test_the_kv_of_an_adapter_is_taken_with_it_alone(in_order: Cores, tmp_path: Path, *, takes_with_one: bool) -> None:
    p, d = in_order
    given, taken = lora(adapter_in(tmp_path / "one", b"1")), lora(adapter_in(tmp_path / "two", b"2"))
    assert not comes(d, p.prefilled("p", lora_request=given), lora_request=taken if takes_with_one else None)


def test_a_name_with_other_files_at_decode_is_another_adapter(in_order: Cores, tmp_path: Path) -> None:
    """Name and path are equal, as in containers; only the bytes differ."""
    p, d = in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    params = p.prefilled("p", lora_request=lora(folder))
    adapter_in(folder, b"new")
    assert not comes(d, params, lora_request=lora(folder))


def changed(folder: Path) -> LoRARequest:
    weights = folder / "adapter_model.safetensors"
    before = weights.stat()
    weights.write_bytes(b"new")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # like a copy that keeps times
    return lora(folder)


@pytest.mark.parametrize(
    "nameless",
    [changed, lambda folder: lora(folder, load_inplace=True), lambda folder: lora(folder / "nowhere", number=2)],
    ids=["changed", "in_place", "not_here"],
)
def test_an_adapter_of_unknown_weights_gives_and_takes_nothing(in_order: Cores, tmp_path: Path, nameless: Any) -> None:
    p, d = in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    good = lora(folder)
    params = p.prefilled("p", lora_request=good)
    d.hooks.arrived(request_of("known", PREFILL, lora_request=good))
    assert d.side.stats.data["refused"] == 0
    named = nameless(folder)
    assert p.prefilled("q", lora_request=named) == {}
    assert not comes(d, params, lora_request=named)


def test_an_adapter_changed_while_it_computes_gives_nothing(in_order: Cores, tmp_path: Path) -> None:
    p, _ = in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    request = request_of("p", PREFILL, lora_request=lora(folder))
    blocks = p.computing(request)
    changed(folder)
    assert p.left(request, blocks) == {}
    p.step()
    assert p.used() == 0


@pytest.mark.parametrize("heard_by", ["a request of nobody's", "a load"])
@pytest.mark.parametrize("same_folder", [True, False])
def test_a_replaced_adapter_gives_nothing(in_order: Cores, tmp_path: Path, heard_by: str, *, same_folder: bool) -> None:
    """vLLM goes on with other weights under the same number. The KV mixes both, and so does its prefix cache under the
    request's path.
    """
    p, _ = in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    request = request_of("p", PREFILL, lora_request=lora(folder))
    blocks = p.computing(request)
    other = folder if same_folder else adapter_in(tmp_path / "other", b"new")
    replacing = lora(other, load_inplace=True)
    if heard_by == "a load":
        p.hooks.adapter_loaded(replacing)
    else:
        p.hooks.arrived(request_of("q", None, lora_request=replacing))
    assert p.left(request, blocks) == {}
    if not same_folder:
        for number, of in enumerate((folder, other), 2):
            assert p.prefilled(f"q{number}", lora_request=lora(of, "later", number)) == {}
    assert p.prefilled("r", lora_request=lora(folder)) == {}


def test_adapters_that_share_a_number_give_nothing(in_order: Cores, tmp_path: Path) -> None:
    """vLLM computes the second one's requests with the weights of the first."""
    p, _ = in_order
    first, second = (lora(adapter_in(tmp_path / name, name.encode()), name) for name in ("a", "b"))
    assert p.prefilled("p", lora_request=first)
    assert p.prefilled("q", lora_request=second) == {}
    assert p.prefilled("r", lora_request=first) == {}


@pytest.mark.parametrize("heard_by", ["a request of nobody's", "a load"])
def test_an_adapter_changed_before_a_request_gives_nothing(in_order: Cores, tmp_path: Path, heard_by: str) -> None:
    """It was loaded before, and vLLM's prefix cache has what it computed under its name and path."""
    p, _ = in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    if heard_by == "a load":
        p.hooks.adapter_loaded(lora(folder))
    else:
        p.hooks.arrived(request_of("p", None, lora_request=lora(folder)))
    changed(folder)
    for number in (1, 2):
        assert p.prefilled(f"q{number}", lora_request=lora(folder, number=number)) == {}


def test_what_decode_offers_for_a_turn_is_of_its_adapter(in_order: Cores, tmp_path: Path) -> None:
    p, d = in_order
    adapter = lora(adapter_in(tmp_path / "adapter", b"same"))
    request = request_of("d", p.prefilled("p", lora_request=adapter), lora_request=adapter)
    blocks = d.begin(request)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    offered = d.left(request, blocks)
    assert offered
    for name, taken in (("without", None), ("with", adapter)):
        asked = request_of(name, {**offered, "do_remote_prefill": True, "do_remote_decode": False}, lora_request=taken)
        p.begin(asked)
        wait_until(lambda n=name: p.step() and n in p.told.loaded)  # type: ignore[misc]
    assert p.told.failed == {"without"}


@pytest.mark.parametrize("begins", ["P", "D"])
@pytest.mark.parametrize("when", ["before", "while it is computed"])
def test_an_adapter_unknown_at_prefill_ends_its_push(in_order: Cores, tmp_path: Path, begins: str, when: str) -> None:
    p, d = in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    known = lora(folder)
    p.hooks.arrived(request_of("first", PREFILL, lora_request=known))
    source = request_of("p", {**PREFILL, **pushed(KEY)}, lora_request=known)
    target = request_of("d", {"do_remote_prefill": True, **pushed(KEY, p.side.engine.address)}, lora_request=known)
    if begins == "D":
        d.begin(target)
        d.step()
    if when == "before":
        changed(folder)
    p.tables["p"] = p.computing(source)
    p.step({"p": 32})
    changed(folder)
    assert p.left(source, p.tables["p"]) == {}
    if begins == "P":
        d.begin(target)
    wait_until(lambda: p.step() and d.step() and d.told.failed == {"d"})  # a registration would wait twice as long
    wait_until(lambda: p.step() and p.used() == 0)


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
def test_adapters_are_told_apart_in_every_format_that_vllm_reads(tmp_path: Path, suffix: str) -> None:
    from kvgrpc.integrations.vllm.adapters import Adapters

    known = Adapters()
    folders = [adapter_in(tmp_path / name, name.encode(), suffix) for name in ("a", "b")]
    names = {known.name(lora(folder, number=number + 1)) for number, folder in enumerate(folders)}
    assert len(names | {known.name(None)}) == 3


@pytest.mark.parametrize(("given", "taken"), [("a", "b"), ("a", None), (None, "a")])
def test_kv_of_another_cache_salt_is_not_taken(in_order: Cores, given: str | None, taken: str | None) -> None:
    p, d = in_order
    assert not comes(d, p.prefilled("p", cache_salt=given), cache_salt=taken)


def test_kv_under_the_same_cache_salt_is_taken(in_order: Cores) -> None:
    p, d = in_order
    assert comes(d, p.prefilled("p", cache_salt="a"), cache_salt="a")


def test_between_engines_another_cache_salt_fails_and_the_same_gives_the_tokens(pair: Pair) -> None:
    prompt = prompt_of(len(PROMPT) + 100, seed=200)
    expected, before = pair.expected(prompt), pair.d.counts()
    params = pair.prefilled(prompt, salt="a")
    for other in ("b", ""):
        assert pair.d.ask(prompt, params, salt=other).failed
    assert pair.d.counts()["lost"] - before.get("lost", 0) == 2
    assert pair.d.ask(prompt, params, salt="a").tokens == expected


# ---- the identity of KV between engines with different configurations

CONNECTOR = {"kv_connector": "KVGrpcConnector", "kv_role": "kv_both"}
CONNECTOR["kv_connector_module_path"] = "kvgrpc.integrations.vllm"
KERNELS = [["CPU_ATTN", "amx", ""]]


def configured(folder: Path, **arguments: Any) -> VllmConfig:
    return EngineArgs(**{"model": str(folder), "skip_tokenizer_init": True, **arguments}).create_engine_config()


def identity(config: VllmConfig, revision: str = "llama", kernels: Kernels = KERNELS) -> str:
    return identity_of(factors_of(config, revision, kernels))


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Path:
    return model_folder / "model"


def rope(**parameters: Any) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **parameters}}}


BYTES: list[dict[str, Any]] = [
    {},
    {"dtype": "float16"},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    rope(rope_theta=20000.0),
    rope(rope_type="linear", factor=2.0),
    {"hf_overrides": {"rms_norm_eps": 1e-3}},
    {"code_revision": "another"},
    {"model_impl": "transformers"},
    {"disable_sliding_window": True},
    {"load_format": "dummy"},
    {"quantization": "fp8"},
    {"enable_lora": True, "lora_dtype": "float16"},
]


def test_whatever_changes_the_bytes_of_the_same_tokens_keeps_engines_apart(model: Path) -> None:
    found = {str(arguments): identity(configured(model, **arguments)) for arguments in BYTES}
    assert len(set(found.values())) == len(BYTES), found


def test_other_weights_keep_engines_apart_by_name_and_revision(model: Path) -> None:
    named = {"kv_connector_extra_config": {"weights_revision": "mine"}}
    transfers = [KVTransferConfig(**CONNECTOR, **more) for more in ({}, named)]
    configs = [configured(model, kv_transfer_config=transfer) for transfer in transfers]
    configs.append(configured(model, kv_transfer_config=transfers[0], revision="another"))
    configs.append(configured(model, kv_transfer_config=transfers[1], load_format="dummy"))
    assert len({identity(config, BlockOptions.of(config).weights_revision) for config in configs}) == 4


@pytest.mark.parametrize(
    "kernels",
    [
        [["FLASH_ATTN", "", ""]],
        [["CPU_ATTN", "vec", ""]],
        [["CPU_ATTN", "amx", "fp8_e4m3", "1.0", "1.0"]],
        [["CPU_ATTN", "amx", ""], ["CPU_ATTN", "vec", ""]],
    ],
    ids=["backend", "order", "type", "layers"],
)
def test_other_kernels_keep_engines_apart(model: Path, kernels: Kernels) -> None:
    config = configured(model)
    assert identity(config, kernels=kernels) != identity(config)


def test_a_draft_with_kv_of_its_own_keeps_engines_apart_and_its_count_of_tokens_does_not(model: Path) -> None:
    draft = {"method": "draft_model", "model": str(model)}
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    plain, few, many, guessed = (
        identity(configured(model, speculative_config=speculative))
        for speculative in (None, {**draft, "num_speculative_tokens": 2}, {**draft, "num_speculative_tokens": 3}, ngram)
    )
    assert plain == guessed != few == many


@pytest.mark.parametrize(
    "arguments",
    [
        {"served_model_name": "another"},
        {"seed": 7},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 4096},
        {"gpu_memory_utilization": 0.3},
        {"kv_cache_memory_bytes": 1 << 30},
        {"num_gpu_blocks_override": 99},
        {"max_model_len": 2048},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
        {"block_size": 32},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"kv_cache_dtype": "bfloat16"},
        {"hf_overrides": {"rms_norm_eps": 1e-6}},
        {"enable_lora": True},
        {"generation_config": "vllm"},
    ],
    ids=str,
)
def test_what_changes_no_byte_pairs(model: Path, arguments: dict[str, Any]) -> None:
    dummy = configured(model, **arguments, load_format="dummy")
    assert identity(configured(model, **arguments)) == identity(configured(model)) != identity(dummy)


def test_the_same_weights_at_another_path_pair_under_one_name(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere")
    dummy = configured(tmp_path / "elsewhere", load_format="dummy")
    assert identity(configured(tmp_path / "elsewhere")) == identity(configured(model)) != identity(dummy)


def test_the_longest_prompt_matters_only_where_rope_follows_it(model: Path) -> None:
    factors = {"long_factor": [2.0] * 16, "short_factor": [1.0] * 16, "original_max_position_embeddings": 1024}
    long = rope(rope_type="longrope", **factors)
    assert len({identity(configured(model, **long, max_model_len=length)) for length in (1024, 2048)}) == 2


def test_every_setting_that_does_not_count_is_one_that_vllm_has() -> None:
    configs = ((ModelConfig, MODEL_BESIDES), (CacheConfig, CACHE_BESIDES), (MultiModalConfig, MULTIMODAL_BESIDES))
    for of, besides in configs:
        assert set() < besides < {field.name for field in dataclasses.fields(of)}


class Layer(AttentionLayerBase):
    """One layer of a loaded model, with the fields that are read."""

    def __init__(self, dtype: str = "auto", isa: str | None = "amx", scale: float = 1.0) -> None:
        self.kv_cache_dtype, self._k_scale_float, self._v_scale_float = dtype, scale, 1.0
        if isa:
            self.isa = isa

    def get_attn_backend(self) -> Any:
        return CPUAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        raise AssertionError("nobody asks")


def test_the_kernels_of_layers_are_named_with_the_type_and_the_scales_of_their_kv(model: Path) -> None:
    layers = [Layer(name) for name in ("bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")]
    layers = [Layer(), *layers, Layer("fp8", scale=0.5), Layer(isa=None)]
    names = [f"layers.{number}" for number in range(len(layers))]
    config = configured(model)
    config.compilation_config.static_forward_context = dict(zip(names, layers, strict=True))
    found = kernels_of(config, names)
    assert found[0] == ["CPU_ATTN", "amx", ""]
    assert len(found) == len(layers) - 2, "those whose KV is the same are one run"
    assert len({str(kernel) for kernel in found}) == len(found)
