"""TensorRT's engine's own, on a stand-in for the device: what it refuses to load, and how it ends."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import PROMPTS
from driving import PARAMS, admit
from fake_device import FakeDevice, FakeEvent, FakeLibrary, FakePlan
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import NAMES, K, Pairs
from restaging import restage

from graphspec.bundle import Host, open_bundle
from graphspec.errors import BundleError, EngineError
from graphspec.runtime import loading
from graphspec.runtime.engine import Chunk
from graphspec.runtime.tensorrt_engine import TensorRtEngine, _pieces
from graphspec.runtime.weights_file import stored_tensors

NAME = NAMES[0]
HOST = Host(backend="tensorrt-rtx", version="1.0.0", device_classes=frozenset({"rtx"}))
WEIGHTS = "weights/model.safetensors"


def opened(path: Path, device: FakeDevice | None = None, *, num_slots: int = 2) -> TensorRtEngine:
    return TensorRtEngine(open_bundle(path, host=HOST), FakeLibrary(), device or FakeDevice(), num_slots=num_slots)


def tokens_of(engine: TensorRtEngine) -> list[int]:
    found = admit(engine, 1, PROMPTS[3], PARAMS[1]).result().tokens(0)
    for width in (K, 0, 1, K):
        found += engine.step([1], width).result().tokens(0)
    return list(found)


@pytest.mark.slow
def test_weights_may_lie_in_any_order(pairs: Pairs, tmp_path: Path) -> None:
    source = pairs.engines(NAME)
    content = rewritten(source / WEIGHTS, lambda tensors: dict(reversed(tensors.items())))
    shuffled = restage(source, tmp_path / "bundle", {WEIGHTS: content})
    assert content != (source / WEIGHTS).read_bytes()
    assert tokens_of(opened(shuffled)) == tokens_of(opened(source))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: dict(list(tensors.items())[1:]), "lacks 1 weights that the engines read"),
        (lambda tensors: {name: value[:-64] for name, value in tensors.items()}, "the engines read"),
    ],
)
def test_weights_that_are_not_the_engines_are_refused(
    pairs: Pairs, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    """They pass every hash: somebody staged them together. A shorter one would be read past its end."""
    source = pairs.engines(NAME)
    path = restage(source, tmp_path / "bundle", {WEIGHTS: rewritten(source / WEIGHTS, change)})
    with pytest.raises(BundleError, match=said):
        opened(path)


def rewritten(path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> bytes:
    """The file with its tensors changed; types and shapes, which nobody reads, are not kept."""
    header, data = dict[str, Any](), b""
    for name, value in change({name: bytes(content) for name, content in stored_tensors(path)}).items():
        header[name] = {"dtype": "U8", "shape": [len(value)], "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 26) + b'{"a":{"data_offsets":[0]}}',
        struct.pack("<Q", 28) + b'{"a":{"data_offsets":[0,9]}}' + b"12345678",
        struct.pack("<Q", 29) + b'{"a":{"data_offsets":[-8,8]}}' + b"12345678",
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.safetensors holds no weights that can be read"):
        list(stored_tensors(path))


@pytest.mark.slow
def test_what_was_launched_and_not_read_is_there_after_closing(pairs: Pairs) -> None:
    engine, device = opened(pairs.engines(NAME)), FakeDevice()
    expected = tokens_of(engine)
    engine = opened(pairs.engines(NAME), device)
    pending = [admit(engine, 1, PROMPTS[3], PARAMS[1])]
    pending += [engine.step([1], width) for width in (K, 0, 1, K)]
    engine.close()
    assert device.closed
    assert [token for step in pending for token in step.result().tokens(0)] == expected


class FailingDevice(FakeDevice):
    """Fails from some moment on, as a GPU does: for good."""

    failed = False

    def synchronise(self, event: FakeEvent) -> None:
        if self.failed:
            raise EngineError("CUDA: an illegal memory access was encountered (cudaErrorIllegalAddress)")
        super().synchronise(event)


@pytest.mark.slow
def test_a_device_that_failed_says_so_to_everyone_and_is_still_freed(pairs: Pairs) -> None:
    device = FailingDevice()
    engine = opened(pairs.engines(NAME), device)
    admit(engine, 0, PROMPTS[3], PARAMS[0]).result()
    launched = [engine.step([0], K), engine.step([0], K)]
    device.failed = True
    with pytest.raises(EngineError, match="illegal memory access"):
        launched[0].result()
    engine.close()
    assert device.closed
    for step in launched:
        with pytest.raises(EngineError, match="illegal memory access"):
            step.result()


@pytest.mark.slow
def test_an_engine_that_cannot_be_captured_is_launched_each_time(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, launched = FakeDevice(), FakeDevice()
    expected = tokens_of(opened(pairs.engines(NAME), captured))
    monkeypatch.setattr(FakePlan, "capturable", False)
    assert tokens_of(opened(pairs.engines(NAME), launched)) == expected
    assert (captured.captured > 0, launched.captured) == (True, 0)


@pytest.mark.slow
def test_a_bundle_that_does_not_load_leaves_nothing_on_the_device(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    device.compute_capability = "sm90"  # type: ignore[attr-defined]

    class Library(FakeLibrary):
        version = "1.0.0"

        def load(self, content: bytes, file: str) -> FakePlan:
            if "prefill" in file:
                raise BundleError("no")
            return super().load(content, file)

    module = pytest.importorskip("graphspec.runtime.cuda_device", reason="cuda-python is not installed")
    monkeypatch.setattr(module, "CudaDevice", lambda: device)
    monkeypatch.setattr("graphspec.runtime.tensorrt_library.TensorRtLibrary", lambda _: Library())
    with pytest.raises(BundleError, match=r"^no$"):
        loading.open_engine(pairs.engines(NAME))
    assert device.closed


@given(length=st.integers(1, 400), sizes=st.sets(st.integers(1, 130), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_prompt_is_read_whole_in_the_fewest_pieces(length: int, sizes: set[int]) -> None:
    """A call reads the weights once, whatever its size: that is what it costs."""
    tokens = tuple(range(length))
    pieces = list(_pieces(Chunk(slot=3, tokens=tokens, next_token=length), sorted(sizes)))
    assert [token for piece, _ in pieces for token in piece.tokens] == list(tokens)
    assert [piece.next_token for piece, _ in pieces] == [piece.tokens[-1] + 1 for piece, _ in pieces]
    assert {piece.slot for piece, _ in pieces} == {3}
    assert len(pieces) == -(-length // max(sizes))
    for piece, size in pieces:
        assert size == min(known for known in sizes if known >= len(piece.tokens))


@pytest.mark.slow
def test_chunks_of_every_length_give_the_same_row(pairs: Pairs) -> None:
    """Around the sizes of the engines, 16 and 128, and beyond the larger one's with what is left of it."""
    engine = opened(pairs.engines(NAME))
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, 60, 18)]
    for length in (1, 15, 16, 17, 18):
        found = []
        for cut in {length, 1, length - 1} - {0}:
            engine.admit(1, PARAMS[0], np.zeros((engine.capacity, 1), np.float32))
            if cut < length:
                engine.prefill(Chunk(slot=1, tokens=tuple(prompt[:cut]), next_token=prompt[cut]))
            rest = prompt[cut:length] if cut < length else prompt[:length]
            last = engine.prefill(Chunk(slot=1, tokens=tuple(rest))).result().tokens(0)
            found.append((last, engine.drafts(1).tolist()))
        assert all(one == found[0] for one in found)
