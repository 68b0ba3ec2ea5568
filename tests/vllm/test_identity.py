"""Nobody gets KV of other weights, or of another tenant, whatever names say."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.vllm.cores import PROMPT, Core, request_of
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
    """Whether D loads what P offers."""
    request = request_of("d", params, **fields)
    blocks = d.begin(request)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    lost = d.told.failed == {"d"}
    touched = any(bool(layer[blocks].any()) for layer in d.memory.values())
    assert touched is not lost
    return not lost


def test_an_adapter_is_known_by_its_files_whatever_name_path_and_number_it_has(
    cores_in_order: tuple[Core, Core], tmp_path: Path
) -> None:
    p, d = cores_in_order
    here, there = adapter_in(tmp_path / "here", b"same"), adapter_in(tmp_path / "there", b"same")
    (there / "README.md").write_text("no weights")
    assert comes(d, p.prefilled("p", lora_request=lora(here)), lora_request=lora(there, "other", 7))


@pytest.mark.parametrize("takes_with_one", [True, False])
def test_an_adapters_kv_is_not_taken_with_another_or_with_none(
    cores_in_order: tuple[Core, Core], tmp_path: Path, *, takes_with_one: bool
) -> None:
    p, d = cores_in_order
    given, taken = lora(adapter_in(tmp_path / "one", b"1")), lora(adapter_in(tmp_path / "two", b"2"))
    assert not comes(d, p.prefilled("p", lora_request=given), lora_request=taken if takes_with_one else None)


def test_a_name_that_was_pointed_elsewhere_at_decode_is_another_adapter(
    cores_in_order: tuple[Core, Core], tmp_path: Path
) -> None:
    """One name, and one path as in containers, where only the bytes differ."""
    p, d = cores_in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    params = p.prefilled("p", lora_request=lora(folder))
    adapter_in(folder, b"new")
    assert not comes(d, params, lora_request=lora(folder))


def changed(folder: Path) -> LoRARequest:
    weights = folder / "adapter_model.safetensors"
    before = weights.stat()
    weights.write_bytes(b"new")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times does
    return lora(folder)


@pytest.mark.parametrize(
    "nameless",
    [changed, lambda folder: lora(folder, load_inplace=True), lambda folder: lora(folder / "nowhere", number=2)],
    ids=["changed", "in_place", "not_here"],
)
def test_an_adapter_whose_weights_cannot_be_told_gives_and_takes_nothing(
    cores_in_order: tuple[Core, Core], tmp_path: Path, nameless: Any
) -> None:
    p, d = cores_in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    good = lora(folder)
    params = p.prefilled("p", lora_request=good)
    assert d.side.arrived(request_of("known", PREFILL, lora_request=good), PREFILL)
    named = nameless(folder)
    assert p.prefilled("q", lora_request=named) == {}
    assert not comes(d, params, lora_request=named)


def test_an_adapter_that_changes_while_it_computes_gives_nothing(
    cores_in_order: tuple[Core, Core], tmp_path: Path
) -> None:
    p, _ = cores_in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    request = request_of("p", PREFILL, lora_request=lora(folder))
    blocks = p.computing(request)
    changed(folder)
    assert p.left(request, blocks) == {}
    p.step()
    assert p.used() == 0


@pytest.mark.parametrize("heard_by", ["a request of nobody's", "a load"])
@pytest.mark.parametrize("from_the_same_folder", [True, False])
def test_an_adapter_that_is_replaced_in_place_while_it_computes_gives_nothing_any_more(
    cores_in_order: tuple[Core, Core], tmp_path: Path, heard_by: str, *, from_the_same_folder: bool
) -> None:
    """vLLM goes on with other weights under the same number: the KV is of both, and so is what its prefix cache keeps
    under the path that the request came with.
    """
    p, _ = cores_in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    request = request_of("p", PREFILL, lora_request=lora(folder))
    blocks = p.computing(request)
    other = folder if from_the_same_folder else adapter_in(tmp_path / "other", b"new")
    replacing = lora(other, load_inplace=True)
    if heard_by == "a load":
        p.hooks.adapter_loaded(replacing)
    else:
        p.hooks.arrived(request_of("q", None, lora_request=replacing))
    assert p.left(request, blocks) == {}
    if not from_the_same_folder:
        for number, of in enumerate((folder, other), 2):
            assert p.prefilled(f"q{number}", lora_request=lora(of, "later", number)) == {}
    assert p.prefilled("r", lora_request=lora(folder)) == {}


def test_adapters_that_share_a_number_give_nothing(cores_in_order: tuple[Core, Core], tmp_path: Path) -> None:
    """vLLM computes the second one's requests with the weights of the first."""
    p, _ = cores_in_order
    first, second = (lora(adapter_in(tmp_path / name, name.encode()), name) for name in ("a", "b"))
    assert p.prefilled("p", lora_request=first)
    assert p.prefilled("q", lora_request=second) == {}
    assert p.prefilled("r", lora_request=first) == {}


@pytest.mark.parametrize("heard_by", ["a request of nobody's", "a load"])
def test_an_adapter_that_changed_before_somebody_asked_for_its_kv_gives_nothing_under_any_number(
    cores_in_order: tuple[Core, Core], tmp_path: Path, heard_by: str
) -> None:
    """It was loaded before, and vLLM's prefix cache has what it computed under its name and path."""
    p, _ = cores_in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    if heard_by == "a load":
        p.hooks.adapter_loaded(lora(folder))
    else:
        p.hooks.arrived(request_of("p", None, lora_request=lora(folder)))
    changed(folder)
    for number in (1, 2):
        assert p.prefilled(f"q{number}", lora_request=lora(folder, number=number)) == {}


def test_what_decode_offers_for_the_next_turn_is_of_its_adapter(
    cores_in_order: tuple[Core, Core], tmp_path: Path
) -> None:
    p, d = cores_in_order
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
def test_decode_learns_at_once_that_a_push_will_not_come_since_its_adapter_has_no_name_at_prefill(
    cores_in_order: tuple[Core, Core], tmp_path: Path, begins: str, when: str
) -> None:
    p, d = cores_in_order
    folder = adapter_in(tmp_path / "adapter", b"old")
    known = lora(folder)
    p.hooks.arrived(request_of("first", PREFILL, lora_request=known))
    source = request_of("p", {**PREFILL, **pushed(KEY)}, lora_request=known)
    target = request_of("d", {"do_remote_prefill": True, **pushed(KEY, p.side.address)}, lora_request=known)
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
    wait_until(lambda: p.step() and d.step() and d.told.failed == {"d"})  # a registration would wait for twice that
    wait_until(lambda: p.step() and p.used() == 0)


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
def test_adapters_are_told_apart_in_every_format_that_vllm_reads(tmp_path: Path, suffix: str) -> None:
    from kvgrpc.integrations.vllm.adapters import Adapters

    known = Adapters()
    folders = [adapter_in(tmp_path / name, name.encode(), suffix) for name in ("a", "b")]
    names = {known.name(lora(folder, number=number + 1)) for number, folder in enumerate(folders)}
    assert len(names | {known.name(None)}) == 3


@pytest.mark.parametrize(("given", "taken"), [("a", "b"), ("a", None), (None, "a")])
def test_kv_under_another_cache_salt_is_not_taken(
    cores_in_order: tuple[Core, Core], given: str | None, taken: str | None
) -> None:
    p, d = cores_in_order
    assert not comes(d, p.prefilled("p", cache_salt=given), cache_salt=taken)


def test_kv_under_the_same_cache_salt_is_taken(cores_in_order: tuple[Core, Core]) -> None:
    p, d = cores_in_order
    assert comes(d, p.prefilled("p", cache_salt="a"), cache_salt="a")


def test_between_engines_another_cache_salt_fails_and_the_same_gives_the_tokens(pair: Pair) -> None:
    prompt = prompt_of(len(PROMPT) + 100, seed=200)
    expected, before = pair.expected(prompt), pair.d.counts()
    params = pair.prefilled(prompt, salt="a")
    for other in ("b", ""):
        assert pair.d.ask(prompt, params, salt=other).failed
    assert pair.d.counts()["lost"] - before.get("lost", 0) == 2
    assert pair.d.ask(prompt, params, salt="a").tokens == expected
