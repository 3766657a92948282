"""Hub ids, against a hub of one repository on this machine and the real huggingface_hub client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save

from graphspec.checkpoints import open_checkpoint
from graphspec.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The requests the client makes, answered for org/tiny."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    refuse: tuple[int, str] | None = None
    """Status and X-Error-Code of every answer."""
    downloaded: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.refuse is not None:
            return self.refuse[0], {"X-Error-Code": self.refuse[1]}, b"{}"
        if path in ("/api/models/org/tiny/revision/main", "/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            return 200, {}, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        if path.startswith("/api/models/org/tiny/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if path == f"/api/models/org/tiny/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        prefix = f"/org/tiny/resolve/{COMMIT}/"
        if path.startswith(prefix) and (name := path.removeprefix(prefix)) in self.files:
            if method == "GET":
                self.downloaded.append(name)
            content = self.files[name]
            etag = hashlib.sha1(content).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def reach(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does what HF_ENDPOINT does to a client that is imported afterwards."""
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = served.answer(self.command, urlsplit(self.path).path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815 — the name http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    reach(served.url, monkeypatch)
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


WEIGHTS = {"a": torch.arange(4.0)}


def test_a_safetensors_repository_is_downloaded_without_what_is_not_needed(hub: Hub, tmp_path: Path) -> None:
    hub.files = {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": save(WEIGHTS),
        "tokenizer.json": b'{"version": "1.0"}',
        "generation_config.json": b"{}",
        "README.md": b"text",
        "pytorch_model.bin": b"the same weights again",
        "consolidated.safetensors": b"the same weights again",
        "original/model.safetensors": b"the same weights again",
        "onnx/config.json": b"{}",
    }
    checkpoint = open_checkpoint("org/tiny", cache_dir=tmp_path)
    assert checkpoint.name == "org/tiny"
    assert checkpoint.config == {"model_type": "llama"}
    assert torch.equal(dict(checkpoint.load(["a"]))["a"], WEIGHTS["a"])
    assert set(checkpoint.tokenizer_files()) == {"tokenizer.json", "generation_config.json"}
    assert sorted(hub.downloaded) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


def test_bin_files_are_downloaded_where_there_are_no_safetensors(hub: Hub, tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "x.bin")
    hub.files = {
        "config.json": b"{}",
        "pytorch_model.bin": (tmp_path / "x.bin").read_bytes(),
        "training_args.bin": b"not weights",
    }
    checkpoint = open_checkpoint("org/tiny", cache_dir=tmp_path)
    assert torch.equal(dict(checkpoint.load(["a"]))["a"], WEIGHTS["a"])
    assert "training_args.bin" not in hub.downloaded


def test_medusa_heads_are_downloaded_where_they_are_all_there_is(hub: Hub, tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "x.pt")
    hub.files = {"config.json": b"{}", "medusa_lm_head.pt": (tmp_path / "x.pt").read_bytes(), "other.pt": b"x"}
    checkpoint = open_checkpoint("org/tiny", cache_dir=tmp_path)
    assert torch.equal(dict(checkpoint.load(["a"]))["a"], WEIGHTS["a"])
    assert "other.pt" not in hub.downloaded


def test_a_downloaded_repository_opens_again_without_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": save(WEIGHTS)}
    open_checkpoint("org/tiny", cache_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert set(open_checkpoint("org/tiny", cache_dir=tmp_path).tensors) == {"a"}


def message(model: str, cache_dir: Path, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model, cache_dir=cache_dir, revision=revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("hub")
def test_a_repository_the_hub_does_not_have_is_neither_path_nor_repository(tmp_path: Path) -> None:
    assert "'org/nothing' is not a path here, and the hub has no such repository" in message("org/nothing", tmp_path)


@pytest.mark.usefixtures("hub")
def test_a_revision_the_hub_does_not_have_is_named(tmp_path: Path) -> None:
    assert "on the hub it has no revision 'v9'" in message("org/tiny", tmp_path, "v9")


def test_a_gated_repository_asks_to_accept_its_terms(hub: Hub, tmp_path: Path) -> None:
    hub.refuse = (403, "GatedRepo")
    assert "only to those who accept its terms" in message("org/tiny", tmp_path)


def test_a_name_the_hub_cannot_have_is_refused(tmp_path: Path) -> None:
    assert "it is not a name that the hub could have" in message("what is this?", tmp_path)


@pytest.mark.usefixtures("hub")
def test_offline_says_that_the_hub_could_not_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    text = message("org/tiny", tmp_path)
    assert "'org/tiny' is not a path here, and the hub could not be reached" in text
    assert "not whole in the hub's cache" in text


def test_a_hub_that_refuses_the_connection_could_not_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach("http://127.0.0.1:9", monkeypatch)
    assert "the hub could not be reached" in message("org/tiny", tmp_path)


def test_a_repository_without_a_model_says_what_came(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "model.Q4_0.gguf": b"x", "model.Q8_0.gguf": b"x"}
    text = message("org/tiny", tmp_path)
    assert "not a checkpoint" in text
    assert "download one .gguf" in text
    assert hub.downloaded == ["config.json"]


def test_an_interrupted_download_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": save(WEIGHTS)}
    open_checkpoint("org/tiny", cache_dir=tmp_path)
    next(tmp_path.rglob("model.safetensors")).unlink()
    hub.refuse = (500, "")
    text = message("org/tiny", tmp_path)
    assert "500 Internal Server Error" in text
    assert "not whole in the hub's cache" in text
