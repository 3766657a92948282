"""A bundle is written whole or not at all, whatever goes wrong on the way."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic import ValidationError

from graphspec import __version__
from graphspec import staging as staging_module
from graphspec.bundle import MANIFEST, open_bundle, verify_bundle
from graphspec.errors import BuildError, BundleError, CheckpointError
from graphspec.manifest import Manifest
from graphspec.staging import Stage, check_dump_folder, check_place, staging

ARTIFACT = Path(__file__).parent / "artifacts" / "format-1"
OLD, NEW = "0" * 64, "1" * 64
WRITTEN_BY_US = ("format", "graphspec_version", "created", "files", "checksum")


def fields(key: str) -> dict[str, Any]:
    stored = json.loads((ARTIFACT / MANIFEST).read_text())
    return {name: value for name, value in stored.items() if name not in WRITTEN_BY_US} | {"key": key}


def fill(stage: Stage, key: str = NEW) -> None:
    shutil.copytree(ARTIFACT, stage.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
    (stage.path / "weights/model.safetensors").write_text(key)


def build(out: Path, key: str = NEW, *, overwrite: bool = True) -> Manifest:
    with staging(out, overwrite=overwrite) as stage:
        fill(stage, key)
        return stage.commit(fields(key))


def attempt(out: Path, work: Callable[[Stage], object], **options: Any) -> None:
    """Stages files and does something else before any commit."""
    with staging(out, **options) as stage:
        fill(stage)
        work(stage)


def throw(failure: BaseException) -> Callable[[Stage], None]:
    def work(_: Stage) -> None:
        raise failure

    return work


def holds(out: Path, key: str) -> bool:
    """Whether `out` is a whole bundle of that key, and nothing lies beside it."""
    whole = verify_bundle(out).key == key and (out / "weights/model.safetensors").read_text() == key
    return whole and os.listdir(out.parent) == [out.name]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "bundles").mkdir()
    return tmp_path / "bundles" / "out"


@pytest.fixture
def old(out: Path) -> Path:
    build(out, OLD)
    return out


def test_a_bundle_appears_with_what_was_staged(out: Path) -> None:
    manifest = build(out)
    assert holds(out, NEW)
    assert manifest == verify_bundle(out)
    assert manifest.graphspec_version == __version__
    assert sorted(manifest.files) == ["graphs/step.onnx", "tokenizer/tokenizer.json", "weights/model.safetensors"]


def test_nothing_is_at_its_place_before_the_commit(out: Path) -> None:
    with staging(out) as stage:
        fill(stage)
        assert not out.exists()
        assert stage.path.parent == out.parent
        stage.commit(fields(NEW))
        assert holds(out, NEW)
        assert stage.committed


def test_others_may_read_what_was_built(out: Path) -> None:
    build(out)
    mask = os.umask(0)
    os.umask(mask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~mask


def test_missing_folders_on_the_way_are_made(tmp_path: Path) -> None:
    build(tmp_path / "a/b/out")
    assert holds(tmp_path / "a/b/out", NEW)


def test_progress_names_each_file(out: Path) -> None:
    seen: list[tuple[str, int]] = []
    with staging(out) as stage:
        fill(stage)
        stage.commit(fields(NEW), on_file=lambda file, size: seen.append((file, size)))
    assert ("weights/model.safetensors", 64) in seen
    assert len(seen) == 3


def test_a_stage_is_committed_once(out: Path) -> None:
    with staging(out) as stage:
        fill(stage)
        stage.commit(fields(NEW))
        with pytest.raises(RuntimeError, match="committed already"):
            stage.commit(fields(NEW))
    assert holds(out, NEW)


def test_without_a_commit_nothing_is_left(tmp_path: Path, old: Path) -> None:
    with staging(tmp_path / "a/b/out") as stage:
        fill(stage)
    with staging(old, overwrite=True) as stage:
        fill(stage)
    assert os.listdir(tmp_path) == ["bundles"]
    assert holds(old, OLD)


FAILURES = [KeyboardInterrupt(), SystemExit(1), GeneratorExit(), CheckpointError("x"), RuntimeError("x"), OSError("x")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failed_build_leaves_the_earlier_bundle_and_nothing_else(old: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)) as caught:
        attempt(old, throw(failure), overwrite=True)
    assert caught.value is failure
    assert holds(old, OLD)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failed_first_build_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)):
        attempt(tmp_path / "a/b/out", throw(failure))
    assert os.listdir(tmp_path) == []


def test_fields_that_are_no_manifest_leave_nothing(old: Path) -> None:
    with pytest.raises(ValidationError, match="capacity"):
        attempt(old, lambda stage: stage.commit({**fields(NEW), "capacity": 1}), overwrite=True)
    assert holds(old, OLD)


def test_a_link_among_the_staged_files_is_refused(out: Path) -> None:
    def work(stage: Stage) -> None:
        (stage.path / "tokenizer/link").symlink_to("tokenizer.json")
        stage.commit(fields(NEW))

    with pytest.raises(BuildError, match="tokenizer/link is not a plain file"):
        attempt(out, work)
    assert os.listdir(out.parent) == []


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wrapped() -> RuntimeError:
    failure = RuntimeError("could not write the graph")
    failure.__cause__ = full()
    return failure


# What the safetensors library, written in Rust, says.
RUST = 'Error while serializing: I/O error: Os { code: 28, kind: StorageFull, message: "No space left on device" }'


@pytest.mark.parametrize(
    "failure", [full(), OSError(errno.EDQUOT, "Disk quota exceeded"), wrapped(), RuntimeError(RUST)], ids=str
)
def test_a_full_disk_is_called_that(old: Path, failure: Exception) -> None:
    said = r"^disk full: .*out cannot be written \(\d+ bytes are free there; the bundle needs 300 bytes\): free some"
    with pytest.raises(BuildError, match=said) as caught:
        attempt(old, throw(failure), overwrite=True, needed_bytes=300)
    assert caught.value.__cause__ is failure
    assert holds(old, OLD)


def test_a_disk_too_small_for_the_bundle_is_told_before_the_work(tmp_path: Path) -> None:
    with (
        pytest.raises(BuildError, match=r"^disk full: .*the bundle needs 1180591620717411303424 bytes"),
        staging(tmp_path / "a/out", needed_bytes=1 << 70),
    ):
        pytest.fail("the work began")
    assert os.listdir(tmp_path) == []


def refusal(out: Path, *, overwrite: bool = True) -> str:
    with pytest.raises(BuildError) as caught, staging(out, overwrite=overwrite):
        pytest.fail("the work began")
    return str(caught.value)


def test_a_bundle_is_replaced_only_when_asked_to(old: Path) -> None:
    assert "out exists: pass --overwrite to replace it" in refusal(old, overwrite=False)
    assert holds(old, OLD)
    build(old, NEW)
    assert holds(old, NEW)


def test_an_empty_folder_is_taken(out: Path) -> None:
    out.mkdir()
    build(out, overwrite=False)
    assert holds(out, NEW)


def test_a_bundle_of_another_format_is_replaced(old: Path) -> None:
    raw = json.loads((old / MANIFEST).read_text())
    (old / MANIFEST).write_text(json.dumps({"format": 99, "files": raw["files"]}))
    build(old)
    assert holds(old, NEW)


def test_a_damaged_bundle_is_replaced(old: Path) -> None:
    (old / "graphs/step.onnx").unlink()
    build(old)
    assert holds(old, NEW)


def test_a_folder_that_is_no_bundle_is_never_replaced(out: Path) -> None:
    (out / "thesis").mkdir(parents=True)
    with pytest.raises(BuildError, match="out exists and is not a bundle"):
        check_place(out)
    for overwrite in (False, True):  # never "pass --overwrite", which would not help
        said = refusal(out, overwrite=overwrite)
        assert "out exists and is not a bundle: it has no manifest.json; choose another place" in said
    (out / MANIFEST).write_text('{"name": "a web app"}')
    assert "out exists and is not a bundle: its manifest.json is not an object with a format number" in refusal(out)
    assert sorted(os.listdir(out)) == [MANIFEST, "thesis"]


def test_a_bundle_with_somebodys_files_in_it_is_never_replaced(old: Path) -> None:
    (old / "graphs/notes.txt").write_text("mine")
    said = refusal(old, overwrite=False)
    assert "--overwrite" not in said
    assert said == refusal(old)
    assert "out holds files its manifest does not list, which replacing it would delete: graphs/notes.txt" in said
    assert (old / "graphs/notes.txt").read_text() == "mine"


def test_a_file_is_never_replaced(out: Path) -> None:
    out.write_text("mine")
    assert "out is not a folder" in refusal(out)
    assert out.read_text() == "mine"


def test_files_put_into_the_earlier_bundle_during_the_build_are_kept(old: Path) -> None:
    def work(stage: Stage) -> None:
        (old / "notes").write_text("mine")
        stage.commit(fields(NEW))

    with pytest.raises(BuildError, match="notes"):
        attempt(old, work, overwrite=True)
    assert (old / "notes").read_text() == "mine"
    assert os.listdir(old.parent) == ["out"]


def test_a_bundle_that_appears_during_the_build_is_kept(out: Path) -> None:
    def work(stage: Stage) -> None:
        build(out, OLD)
        stage.commit(fields(NEW))

    with pytest.raises(BuildError, match="out exists"):
        attempt(out, work)
    assert holds(out, OLD)


def test_an_equal_bundle_that_appears_during_the_build_is_the_result(out: Path) -> None:
    """Two equal builds at once: the second has what it asked for."""
    with staging(out) as stage:
        fill(stage)
        first = build(out)
        assert stage.commit(fields(NEW)) == first
        assert not stage.committed
    assert holds(out, NEW)


def test_an_equal_bundle_that_appears_damaged_is_no_result(out: Path) -> None:
    def work(stage: Stage) -> None:
        build(out)
        (out / "weights/model.safetensors").write_text("x" * 64)
        stage.commit(fields(NEW))

    with pytest.raises(BuildError, match="out exists"):
        attempt(out, work)


def test_an_equal_bundle_is_replaced_where_that_is_asked_for(old: Path) -> None:
    with staging(old, overwrite=True) as stage:
        fill(stage, OLD)
        stage.commit(fields(OLD))
        assert stage.committed
    assert holds(old, OLD)


def test_what_a_link_points_to_is_replaced_and_not_the_link(old: Path) -> None:
    link = old.parents[1] / "current"
    link.symlink_to(old)
    build(link)
    assert link.is_symlink()
    assert holds(old, NEW)


def test_a_place_that_cannot_be_written_is_told(out: Path) -> None:
    out.write_text("a file")
    assert "out/inner cannot be written: Not a directory" in refusal(out / "inner")
    assert "cannot be written: File name too long" in refusal(out.parent / ("x" * 250))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_not_called_full(
    out: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, *_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(BuildError) as caught, staging(out, needed_bytes=1 << 70):
        pytest.fail("the work began")
    assert f"out cannot be written: {os.strerror(code)} in {out.parent}; choose another" in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("name", ["/proc/out", "/proc/deeper/out"])
def test_a_file_system_that_takes_no_files_is_not_called_full(name: str) -> None:
    with pytest.raises(BuildError) as caught, staging(Path(name), needed_bytes=1000):
        pytest.fail("the work began")
    assert str(caught.value) == f"{name} cannot be written: nothing can be made in /proc; choose another place"


def test_a_full_disk_elsewhere_is_not_called_the_bundles(out: Path, tmp_path: Path) -> None:
    """--dump-passes may go to another disk."""

    def work(_: Stage) -> None:
        run_dump(tmp_path / "passes", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    with pytest.raises(BuildError) as caught:
        attempt(out, work)
    said = str(caught.value)
    assert said.startswith(f"--dump-passes {tmp_path / 'passes'}: 00_nothing.onnx cannot be written: disk full")


def run_dump(folder: Path, failure: OSError) -> None:
    """A compiler pass whose dump fails."""
    from graphspec.export import pipeline

    with pytest.MonkeyPatch.context() as patch:

        def write(*_: object) -> None:
            raise failure

        patch.setattr(pipeline, "write_without_weights", write)
        nothing = pipeline.Pass("nothing", lambda _: None)
        pipeline.run_passes(None, [nothing], on_pass=lambda _: None, dump=folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["notes", "notes/passes", "notes/a/b"])
def test_a_dump_folder_that_cannot_be_one_is_told_before_the_work(tmp_path: Path, place: str) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(BuildError, match=r"^--dump-passes .*: .*notes: not a folder; choose another folder"):
        check_dump_folder(tmp_path / place)


@pytest.mark.parametrize("place", ["passes", "passes/a/b"])
def test_a_dump_folder_may_be_missing(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_dump_folder(tmp_path / place)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BuildError, match=r"^--dump-passes .* cannot be written: .*: permission denied"):
        check_dump_folder(tmp_path / place)


class Interrupted:
    """Runs something and raises at the n-th line that staging.py executes in it."""

    def __init__(self, line: int, failure: Callable[[], BaseException]) -> None:
        self.left = line
        self.failure = failure
        self.where = ""
        """The functions that were running then, innermost first."""

    def run(self, action: Callable[[], object]) -> bool:
        """Whether the line was reached."""
        earlier = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        except BaseException as error:
            if not self.where:
                raise
            assert isinstance(error, (type(self.failure()), BuildError))  # noqa: PT017
        finally:
            sys.settrace(earlier)
        return bool(self.where)

    def wanted(self, function: str) -> bool:
        return bool(function)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != staging_module.__file__:
            return None
        if event == "line" and not self.where and self.wanted(frame.f_code.co_name):
            self.left -= 1
            if self.left == 0:
                self.where = " ".join(_callers(frame))
                raise self.failure()
        return self._trace


def _callers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def end_of_process(folder: Path) -> None:
    """Closes what an interrupted build left open, as the end of its process would: locks end with it."""
    inside = [folder.stat(), *(path.stat() for path in folder.iterdir())]
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            if any(os.path.samestat(os.fstat(number), info) for info in inside):
                os.close(number)


@pytest.mark.slow
# A file object whose `with` was never reached closes itself, with a warning, when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("failure", [KeyboardInterrupt, full])
def test_an_interrupt_at_any_line_leaves_a_whole_bundle(old: Path, failure: Callable[[], BaseException]) -> None:
    line = 1
    while (interrupt := Interrupted(line, failure)).run(lambda: build(old, NEW)):
        end_of_process(old.parent)
        left = [name for name in os.listdir(old.parent) if name != "out"]
        cleaning_up = "_close" in interrupt.where or interrupt.where.startswith("staging ")
        assert left == [] or cleaning_up, (line, interrupt.where, left)
        with staging(old, overwrite=True):
            pass  # whatever a second interrupt, during the cleaning up, left is cleared by the next build
        assert holds(old, OLD) or holds(old, NEW), (line, interrupt.where)
        build(old, OLD)
        line += 1
    assert line > 100
    assert holds(old, NEW)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_staging
def die():
    os.kill(os.getpid(), signal.SIGKILL)
class Killed(test_staging.Interrupted):
    def wanted(self, name): return name == "_put_in_place"
Killed({line}, die).run(lambda: test_staging.build(Path({out!r})))
"""


def killed_at(line: int, out: Path) -> bool:
    """Builds in a process that is killed at a line of `_put_in_place`; whether it was."""
    script = KILLED.format(tests=str(Path(__file__).parent), line=line, out=str(out))
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode != 0


@pytest.mark.slow
def test_after_a_kill_the_next_build_finds_the_earlier_bundle_or_the_new_one(old: Path) -> None:
    line = 1
    states = set()
    while killed_at(line, old):
        states.add(tuple(sorted(name.split("-")[0] for name in os.listdir(old.parent))))
        with staging(old, overwrite=True):
            pass
        assert holds(old, OLD) or holds(old, NEW), line
        build(old, OLD)
        line += 1
    # Before, between and after the two renames: the test did reach the dangerous moment.
    assert {(".out.tmp", "out"), (".out.old", ".out.tmp"), (".out.old", "out")} <= states


def test_leftovers_of_dead_builds_are_cleared_and_only_those(out: Path) -> None:
    build(out, OLD)
    dead, old = out.with_name(".out.tmp-1-0123abcd"), out.with_name(".out.old-1-0123abcd")
    others = [".out2.tmp-1-0123abcd", ".out.tmp-1-xyz", ".out.tmp", "out.tmp-1-0123abcd"]
    for folder in (dead, old, *(out.with_name(name) for name in others)):
        folder.mkdir()
        (folder / "weights").write_text("x")
    link = out.with_name(".out.tmp-2-0123abcd")
    link.symlink_to(out.with_name(".out2.tmp-1-0123abcd"))
    build(out)
    assert sorted(os.listdir(out.parent)) == sorted(["out", link.name, *others])
    assert all((out.with_name(name) / "weights").exists() for name in others)


def test_a_build_in_progress_is_left_alone_whatever_its_process_id_says(out: Path) -> None:
    foreign = out.with_name(".out.tmp-4194303-0123abcd")  # another container's: no such process here
    foreign.mkdir()
    lock = os.open(foreign, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with staging(out) as stage:
        fill(stage)
        build(out, OLD)
        assert foreign.exists()
        assert stage.path.exists()
    os.close(lock)
    build(out)
    assert holds(out, NEW)


def test_a_bundle_moved_aside_by_a_killed_build_comes_back(old: Path) -> None:
    old.rename(old.with_name(".out.old-1-0123abcd"))
    assert "out exists" in refusal(old, overwrite=False)
    assert holds(old, OLD)


def replaced_while_read(out: Path) -> Callable[[str, int], None]:
    """Replaces the bundle when its first file is about to be hashed."""
    left = [NEW]

    def replace(_: str, __: int) -> None:
        if left:
            build(out, left.pop())

    return replace


def test_a_bundle_replaced_while_it_is_checked_is_not_called_damaged(old: Path) -> None:
    opened = open_bundle(old, on_file=replaced_while_read(old))
    assert opened.manifest == verify_bundle(old)
    assert holds(old, NEW)


def test_a_bundle_replaced_while_it_is_loaded_is_told(old: Path) -> None:
    opened = open_bundle(old)
    opened.confirm()
    build(old)
    with pytest.raises(BundleError, match="was replaced while it was loaded: load it again"):
        opened.confirm()


def test_a_bundle_removed_while_it_is_checked_is_no_bundle(old: Path) -> None:
    with pytest.raises(BundleError, match="there is no such folder"):
        open_bundle(old, on_file=lambda *_: shutil.rmtree(old, ignore_errors=True))


def test_builds_at_the_same_time_leave_one_whole_bundle(out: Path) -> None:
    keys = [f"{number:064x}" for number in range(4)]
    failures: list[BaseException] = []

    def repeat(key: str) -> None:
        try:
            for _ in range(8):
                build(out, key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert any(holds(out, key) for key in (verify_bundle(out).key,))


BUILDER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_staging
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    test_staging.build(Path({out!r}), {key!r})
"""


def test_processes_building_at_the_same_time_leave_one_whole_bundle(out: Path) -> None:
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER.format(tests=str(Path(__file__).parent), out=str(out), key=key)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for key in (OLD, NEW)
    ]
    for builder in builders:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "ready\n"
    for builder in builders:
        assert builder.stdin is not None
        builder.stdin.write("\n")
        builder.stdin.flush()
    assert [builder.communicate()[1] for builder in builders] == ["", ""]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert holds(out, OLD) or holds(out, NEW)
