"""Snapshots in the memory of hosts: who keeps what, what is left when hosts are lost, and what damage and want cost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.manifest import Manifest, directory_of
from holdfast.checkpoint.format.parts import fill, lay_out, seal, tensor_names
from holdfast.checkpoint.host_memory import snapshot_files as host_memory
from holdfast.checkpoint.host_memory.erasure import Code
from holdfast.checkpoint.host_memory.fragments import Fragment, PlaceAmongHosts, code_for, indices_of, kept_by
from holdfast.checkpoint.host_memory.gathering import GatheredStorage, MemorySource, newest_gathered, whole_steps
from holdfast.checkpoint.host_memory.place import OWNER, kept_steps, memory_directory, sweep
from holdfast.checkpoint.host_memory.snapshot_files import HostMemory
from holdfast.checkpoint.restoring.reading import newest_valid, verify
from holdfast.checkpoint.saving.side_by_side import image_buffer
from holdfast.checkpoint.settings import CheckpointSettings, parse_memory
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import ConfigError, IntegrityError, StorageUnavailable
from holdfast.core.options.declaring import option_words
from holdfast.state.layout import readable, spec_of
from holdfast.state.snapshot import Snapshot

from .conftest import every_kind, snapshot_of

KINDS = [None, (2, 1), (4, 2), (3, 3), (1, 2)]


@dataclass
class Taken:
    """A snapshot as the workers have it: images of its parts, and what the manifest would be."""

    manifest: Manifest
    images: dict[int, torch.Tensor]


def taken(step: int) -> Taken:
    snapshot = snapshot_of(every_kind(step), step)
    tensors = [readable(tensor, "") for tensor in snapshot.tensors]
    specs = tuple(spec_of(tensor) for tensor in tensors)
    names = tuple(tensor_names(snapshot.tree, len(specs)))
    images, stored = {}, []
    for part in lay_out(names, specs, step):
        image = images[part.number] = image_buffer(part.size)
        fill(part, image, tensors)
        stored.append(Stored(seal(part, image), part.size))
    manifest = Manifest(step=step, run="r", tree=snapshot.tree, names=names, specs=specs, parts=tuple(stored))
    return Taken(manifest, images)


class Hosts:
    """The memories of several hosts, in directories side by side, and what they said."""

    def __init__(self, parent: Path, kind: tuple[int, int] | None, hosts: int, workers: int = 1) -> None:
        self.workers = workers
        self.said: list[str] = []
        self.names = [f"h{number}" for number in range(hosts)]
        self.memories = [
            HostMemory(parent / name, kind, run_directory=parent, warn=self.said.append) for name in self.names
        ]

    def keep(self, what: Taken, *, without: Sequence[tuple[int, int]] = ()) -> None:
        """All workers of all hosts, but for some (host, worker)."""
        for host, memory in enumerate(self.memories):
            for worker in range(self.workers):
                if (host, worker) not in without:
                    place = PlaceAmongHosts(len(self.memories), host, self.workers, worker)
                    mine = memory.parts(place, len(what.manifest.parts))
                    assert memory.keep(place, what.manifest, {number: what.images[number] for number in mine})

    def gathered(self, *hosts: int) -> GatheredStorage:
        chosen = hosts or range(len(self.memories))
        return GatheredStorage(
            [MemorySource(self.names[host], LocalStorage(self.memories[host].root)) for host in chosen]
        )

    def files(self, host: int, step: int) -> list[Path]:
        return sorted((self.memories[host].root / directory_of(step)).glob("part-*"))

    def nbytes(self, host: int) -> int:
        return sum(path.stat().st_size for path in self.memories[host].root.rglob("*") if path.is_file())


def newest(storage: GatheredStorage, at_least: int = 0) -> tuple[Snapshot | None, list[str]]:
    said: list[str] = []
    found = newest_gathered(storage, at_least=at_least, warn=said.append)
    return (found[1] if found else None), said


def same(found: Snapshot | None, step: int) -> bool:
    expected = snapshot_of(every_kind(step), step)
    assert found is not None
    assert (found.step, found.tree) == (step, expected.tree)
    pairs = zip(found.tensors, expected.tensors, strict=True)
    return all(bytes_of(one) == bytes_of(other) for one, other in pairs)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def flip(path: Path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x10
    path.write_bytes(data)


# -- who keeps what


@given(k=st.integers(1, 12), m=st.integers(1, 6), hosts=st.integers(1, 24), number=st.integers(0, 500))
def test_each_fragment_is_kept_by_one_host_and_they_are_spread_evenly(k: int, m: int, hosts: int, number: int) -> None:
    code = Code(k, m)
    kept = [indices_of(number, code, PlaceAmongHosts(hosts, host, 1, 0)) for host in range(hosts)]
    assert sorted(index for indices in kept for index in indices) == list(range(k + m))
    assert max(map(len, kept)) == -(-(k + m) // hosts)
    chosen = code_for((k, m), hosts)
    assert (chosen is None) == (max(map(len, kept)) >= k), "a host with as much as a whole part has the part"


@given(
    kind=st.sampled_from(KINDS),
    hosts=st.integers(1, 9),
    workers=st.integers(1, 5),
    parts=st.integers(1, 40),
)
def test_the_workers_of_a_host_share_its_parts(
    kind: tuple[int, int] | None, hosts: int, workers: int, parts: int
) -> None:
    for host in range(hosts):
        shares = [kept_by(PlaceAmongHosts(hosts, host, workers, worker), kind, parts) for worker in range(workers)]
        code = code_for(kind, hosts)
        needed = {n for n in range(parts) if code is None or indices_of(n, code, PlaceAmongHosts(hosts, host, 1, 0))}
        assert sum(map(len, shares)) == len(needed) and frozenset().union(*shares) == needed


def test_a_place_is_that_among_hosts_by_name() -> None:
    members = ("w0.1@beta", "w0.3@alpha", "w1.1@beta", "w0.1@gamma")
    assert PlaceAmongHosts.of("w1.1@beta", members) == PlaceAmongHosts(3, 1, 2, 1)
    assert PlaceAmongHosts.of("w0.3@alpha", members) == PlaceAmongHosts(3, 0, 1, 0)
    assert PlaceAmongHosts.of("w1.1", ("w0.1", "w1.1")) == PlaceAmongHosts(1, 0, 2, 1)


@given(st.text(max_size=120))
def test_what_is_no_fragment_is_none(text: str) -> None:
    assert Fragment.parse(text) is None


def test_a_fragment_is_what_its_name_says() -> None:
    good = Fragment(f"part-0003-{'a' * 32}.safetensors", 5, 4, 2, 70_000, "b" * 32)
    assert Fragment.parse(good.name) == good
    for change in ({"index": 6}, {"k": 0}, {"m": 0}, {"k": 63}, {"size": 0}, {"size": 10**10 - 1}):
        assert Fragment.parse(Fragment(**{**good.__dict__, **change}).name) is None, change
    assert Fragment.parse(good.name.replace(".5of", ".05of")) is None


@pytest.mark.parametrize(("text", "kind"), [("", None), ("plain", None), ("2+1", (2, 1)), ("40+24", (40, 24))])
def test_codes_as_users_write_them(text: str, kind: tuple[int, int] | None) -> None:
    assert parse_memory(text) == kind
    settings = CheckpointSettings(memory=text).validate()
    assert option_words(settings) == (["--memory", text] if text else [])
    assert CheckpointSettings.decode(settings.encode()) == settings


@pytest.mark.parametrize("text", ["0+1", "4+0", "60+5", "twice", "4+2+1", "+", "-1+2", "4 + 2"])
def test_what_is_no_code(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory is"):
        CheckpointSettings(memory=text).validate()


# -- hosts that are lost


@pytest.mark.parametrize(("hosts", "workers"), [(1, 3), (2, 1), (3, 2), (7, 1)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_may_be_lost_and_no_more(
    kind: tuple[int, int] | None, hosts: int, workers: int, tmp_path: Path, small_parts: int
) -> None:
    land = Hosts(tmp_path, kind, hosts, workers)
    what = taken(7)
    land.keep(what)
    assert land.said == []
    code = code_for(kind, hosts)
    # Of every part k fragments must be left, and one manifest; whole parts are enough by themselves.
    for left in range(1, hosts + 1):
        for chosen in combinations(range(hosts), left):
            enough = code is None or all(
                sum(len(indices_of(number, code, PlaceAmongHosts(hosts, host, 1, 0))) for host in chosen) >= code.k
                for number in range(len(what.manifest.parts))
            )
            storage = land.gathered(*chosen)
            assert whole_steps(storage) == ([7] if enough else []), chosen
            if enough and (left <= 2 or hosts <= 3):
                found, said = newest(storage)
                assert same(found, 7) and not said


def test_a_plain_memory_is_a_storage_like_any_other(tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, None, 1, workers=2)
    land.keep(taken(4))
    storage = LocalStorage(land.memories[0].root)
    assert verify(storage, 4) == []
    found = newest_valid(storage, warn=pytest.fail)
    assert found is not None and same(found[1], 4)


def test_a_code_keeps_its_share_on_each_host_and_not_more(tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, (4, 2), 6)
    what = taken(3)
    land.keep(what)
    state = what.manifest.nbytes
    fixed = len(what.manifest.encode()) + 4096
    for host in range(6):
        assert land.nbytes(host) <= state / 4 + 64 * len(what.manifest.parts) + fixed


def test_two_steps_at_most_and_the_newest_whole_one_stays(tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, (2, 1), 3, workers=2)
    for step in (5, 10, 15, 20):
        land.keep(taken(step))
        for memory in land.memories:
            assert kept_steps(memory.root) == sorted({step, max(5, step - 5)}, reverse=True)
            assert sorted(path.name for path in memory.root.iterdir()) == sorted(
                {OWNER, directory_of(step), directory_of(max(5, step - 5))}
            )
    # A worker is lost in the middle of the next: what was whole is not touched, what is begun is written over.
    land.keep(taken(25), without=[(1, 1)])
    assert kept_steps(land.memories[1].root) == [20]
    assert kept_steps(land.memories[0].root) == [25, 20]
    found, _ = newest(land.gathered(0, 1, 2))
    assert same(found, 25), "two of three fragments are enough"
    found, _ = newest(land.gathered(0, 1))
    assert found is not None and found.step in (20, 25)
    assert same(found, found.step)
    land.keep(taken(30))
    assert all(kept_steps(memory.root)[0] == 30 for memory in land.memories)


def test_memory_of_older_files_is_used_again(tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, None, 1)
    land.keep(taken(1))
    first = {path.stat().st_ino for path in land.files(0, 1)}
    land.keep(taken(2))
    land.keep(taken(3))
    assert {path.stat().st_ino for path in land.files(0, 3)} == first
    found, said = newest(land.gathered())
    assert same(found, 3) and not said


def test_what_another_worker_clears_away_meanwhile_is_not_missed(
    tmp_path: Path, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, None, 1)
    for step in (5, 10):
        hosts.keep(taken(step))
    unlink = Path.unlink

    def cleared(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.parent.name == directory_of(5):
            shutil.rmtree(path.parent)

    monkeypatch.setattr(Path, "unlink", cleared)
    hosts.keep(taken(15))
    assert not hosts.said and kept_steps(tmp_path / "h0") == [15, 10]


def test_a_run_that_went_back_writes_over_what_it_did_not_use(tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, None, 1)
    for step in (10, 20):
        land.keep(taken(step))
    land.keep(taken(15))
    assert kept_steps(land.memories[0].root) == [15, 10]


def test_killed_at_any_moment_the_newest_step_that_was_kept_is_whole(tmp_path: Path, small_parts: int) -> None:
    """Two workers of each of three hosts, as processes that save one step after the other, killed all at once."""
    seed = 20_817
    chance = random.Random(seed)
    states = [taken(step) for step in range(1, 7)]
    hosts, workers, caught, deep = 3, 2, 0, 0
    for trial in range(24):
        parent = tmp_path / str(trial)
        parent.mkdir()
        children = {
            (host, worker): forked(saving(parent, PlaceAmongHosts(hosts, host, workers, worker), states))
            for host in range(hosts)
            for worker in range(workers)
        }
        for _, reading in children.values():
            assert os.read(reading, 1) == b"."
        passed = chance.randrange(len(states) - 1)  # steps, before the moment comes
        for _ in range(passed):
            assert os.read(children[0, 0][1], 1) == b"."
        time.sleep(chance.uniform(0, 0.01))
        for pid, _ in children.values():
            os.kill(pid, signal.SIGKILL)
        done = []
        for pid, reading in children.values():
            os.waitpid(pid, 0)
            with os.fdopen(reading, "rb") as told:
                done.append(len(told.read()))  # how many steps this worker has kept
        done[0] += passed
        sources = [MemorySource(f"h{host}", LocalStorage(parent / f"h{host}")) for host in range(hosts)]
        found, said = newest(GatheredStorage(sources))
        assert not said, f"seed {seed}, trial {trial}: {said}"
        assert (found.step if found else 0) >= min(done), f"seed {seed}, trial {trial}: {done}"
        assert found is None or same(found, found.step)
        caught += max(done) < len(states)
        deep += min(done) >= 2  # memory of an older step was being used again
        shutil.rmtree(parent)
    assert caught >= 12 and deep >= 6, f"seed {seed}: {caught} were killed in the middle, {deep} after two steps"


def forked(body: Callable[[Callable[[], None]], None]) -> tuple[int, int]:
    """A process, and where it writes a dot at its start and whenever `body` calls what it is given."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.write(writing, b".")
        body(lambda: void(os.write(writing, b".")))
        signal.pause()
    finally:
        os._exit(1)


def void(_: object) -> None:
    pass


def saving(parent: Path, place: PlaceAmongHosts, states: Sequence[Taken]) -> Callable[[Callable[[], None]], None]:
    """What one worker does. As in a run, nobody begins a step before all have kept the last."""

    def body(kept: Callable[[], None]) -> None:
        memory = HostMemory(parent / f"h{place.host}", (2, 1), run_directory=parent, warn=void)
        for number, state in enumerate(states):
            mine = memory.parts(place, len(state.manifest.parts))
            assert memory.keep(place, state.manifest, {one: state.images[one] for one in mine})
            kept()
            (parent / f"kept-{number}-{place.host}-{place.worker}").touch()
            while len(list(parent.glob(f"kept-{number}-*"))) < place.hosts * place.workers:
                time.sleep(0.0005)

    return body


# -- damage


@pytest.mark.parametrize("kind", [None, (2, 1), (4, 2)], ids=str)
def test_a_flipped_bit_is_named_and_the_same_step_is_had_from_the_others(
    kind: tuple[int, int] | None, tmp_path: Path, small_parts: int
) -> None:
    land = Hosts(tmp_path, kind, 6)
    land.keep(taken(5))
    land.keep(taken(9))
    victims = land.files(0, 9)[:3]
    for path in victims:
        flip(path, at=5000)
    found, said = newest(land.gathered())
    assert same(found, 9)
    for path in victims:
        assert any(path.name in sentence and "h0" in sentence for sentence in said), said
    assert len(said) == 3


@pytest.mark.parametrize("how", ["truncated", "deleted", "garbage", "manifest"])
def test_other_damage(how: str, tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, (2, 1), 3)
    land.keep(taken(9))
    victim = land.files(1, 9)[0]
    if how == "truncated":
        os.truncate(victim, 100)
    elif how == "deleted":
        victim.unlink()
    elif how == "garbage":
        victim.write_bytes(os.urandom(victim.stat().st_size))
    else:
        flip(victim.parent / "manifest.json")
    found, said = newest(land.gathered(1, 0, 2))
    assert same(found, 9)
    assert len(said) == (how == "garbage"), said


def test_more_damage_than_parities_and_the_older_step_is_taken(tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, (2, 1), 3)
    land.keep(taken(5))
    land.keep(taken(9))
    number = land.files(0, 9)[0].name[:9]
    for host in (0, 1):
        flip(next(path for path in land.files(host, 9) if path.name.startswith(number)))
    found, said = newest(land.gathered())
    assert same(found, 5)
    assert any("step 9" in sentence for sentence in said)
    assert newest(land.gathered(), at_least=6)[0] is None, "storage has a newer one"


def test_a_host_that_stops_answering_is_passed_over(tmp_path: Path, small_parts: int) -> None:
    class Failing(LocalStorage):
        reads = 0

        def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
            Failing.reads += 1
            if Failing.reads > 2:
                raise StorageUnavailable("it is gone")
            super().read_into(name, memory, offset)

    land = Hosts(tmp_path, (2, 1), 3)
    land.keep(taken(6))
    sources = [MemorySource(name, LocalStorage(tmp_path / name)) for name in land.names]
    sources[0] = MemorySource("h0", Failing(tmp_path / "h0"))
    found, said = newest(GatheredStorage(sources))
    assert same(found, 6) and not said and Failing.reads > 2
    with pytest.raises(IntegrityError, match="too few"):
        storage = GatheredStorage(sources[:2])
        storage.read_into(storage.list("checkpoint-")[1].name, memoryview(bytearray(10)))


# -- want of room, and what others left


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("a memory file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_no_room_is_one_warning_and_leaves_nothing_behind(
    small_tmpfs: Path, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    memory = HostMemory(small_tmpfs / "h0", None, run_directory=small_tmpfs, warn=said.append)
    what, place = taken(1), PlaceAmongHosts(1, 0, 1, 0)
    assert what.manifest.nbytes > 192 * 1024
    (small_tmpfs / "ballast").write_bytes(bytes(128 * 1024))
    for step in (1, 2):
        assert not memory.keep(place, taken(step).manifest, taken(step).images)
    assert len(said) == 1 and "room for" in said[0]
    # As if others took it after the room was looked at.
    monkeypatch.setattr(memory, "_check_room", lambda *_: None)
    assert not memory.keep(place, what.manifest, what.images)
    assert sum(path.stat().st_size for path in (small_tmpfs / "h0").rglob("part-*")) == 0
    assert not list((small_tmpfs / "h0").rglob(".new-*"))
    monkeypatch.undo()
    (small_tmpfs / "ballast").unlink()


def test_the_machines_memory_counts_too(tmp_path: Path, small_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_available_bytes", lambda: host_memory.RESERVE_BYTES + 1000)
    said: list[str] = []
    memory = HostMemory(tmp_path / "h0", None, run_directory=tmp_path, warn=said.append)
    assert not memory.keep(PlaceAmongHosts(1, 0, 1, 0), taken(1).manifest, taken(1).images)
    assert len(said) == 1
    monkeypatch.undo()
    assert memory.keep(PlaceAmongHosts(1, 0, 1, 0), taken(1).manifest, taken(1).images), "there is room again"


def test_the_limit_of_a_container_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    inside = [line[4:] for line in lines if line.startswith("0::/")]
    if not inside:
        pytest.skip("this kernel has no second version of control groups")
    group = tmp_path / inside[0]
    group.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path)
    free = host_memory._available_bytes()
    assert free > 1 << 20
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2500000\n")
    (group / "memory.stat").write_text("anon 2000000\ninactive_file 100000\n")
    assert host_memory._available_bytes() == 600_000
    (group / "memory.max").write_text("max\n")
    assert host_memory._available_bytes() > 1 << 20


def test_the_directory_is_this_users_alone(tmp_path: Path, small_parts: int) -> None:
    trap = tmp_path / "elsewhere"
    trap.mkdir()
    (tmp_path / "h0").symlink_to(trap)
    land = Hosts(tmp_path, None, 1)
    what = taken(1)
    assert not land.memories[0].keep(PlaceAmongHosts(1, 0, 1, 0), what.manifest, what.images)
    assert len(land.said) == 1 and not list(trap.iterdir())
    (tmp_path / "h0").unlink()
    land.keep(what)
    assert (tmp_path / "h0").stat().st_mode & 0o777 == 0o700


def test_runs_and_hosts_have_directories_of_their_own(tmp_path: Path) -> None:
    places = {
        memory_directory(tmp_path / name, secret)
        for name in ("r@h1", "r@h2", "other@h1")
        for secret in (b"secret one", b"secret two")
    }
    assert len(places) == 6
    assert all(place.parent == Path("/dev/shm") for place in places)


def test_what_a_deleted_run_left_is_swept_by_the_next(tmp_path: Path, small_parts: int) -> None:
    memories = tmp_path / "shm"
    memories.mkdir()
    what = taken(1)
    roots = {}
    for name in ("deleted", "living", "foreign"):
        directory = tmp_path / name
        directory.mkdir()
        root = roots[name] = memory_directory(directory, b"secret", parent=memories)
        memory = HostMemory(root, None, run_directory=directory, warn=pytest.fail)
        assert memory.keep(PlaceAmongHosts(1, 0, 1, 0), what.manifest, what.images)
    for name in ("deleted", "foreign"):
        (tmp_path / name).rmdir()
    owner = json.loads((roots["foreign"] / OWNER).read_text())
    (roots["foreign"] / OWNER).write_text(json.dumps({**owner, "place": "another container"}))
    (memories / f"holdfast-{os.getuid()}-strange").mkdir()
    sweep(memories)
    assert not roots["deleted"].exists()
    assert roots["living"].exists() and roots["foreign"].exists(), "who cannot be asked is left alone"


def test_a_directory_that_was_cleared_away_is_made_again(tmp_path: Path, small_parts: int) -> None:
    land = Hosts(tmp_path, None, 1)
    land.keep(taken(1))
    subprocess.run(["rm", "-r", str(tmp_path / "h0")], check=True)
    land.keep(taken(2))
    assert kept_steps(tmp_path / "h0") == [2] and not land.said
