"""One copy of a store per node, whatever happens to those who use it."""

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from data_makers import contents, write_folder

import launcher.data.cache as cache_module
from launcher.data.cache import node_cache
from launcher.data.pack import pack
from launcher.data.store import Store

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    write_folder(root / "source", 20)
    pack(root / "source", root / "store", image_size=16)
    return root / "store"


def copies(root: Path) -> list[str]:
    return sorted(
        file.name for file in root.rglob("*") if file.is_dir() and len(file.name) != len("vlfit-cache-0")
    )


def test_a_copy_is_made_used_and_removed(store: Path, tmp_path: Path) -> None:
    with node_cache(store, [tmp_path]) as cached:
        assert tmp_path in cached.path.parents
        assert contents(cached.path) == contents(store)
        assert "copied" in cached.message
    assert copies(tmp_path) == []


def use(store: Path, root: Path, log: Path, seconds: float) -> None:
    with node_cache(store, [root]) as cached:
        assert len(Store.open(cached.path)) == 20
        with log.open("a") as file:
            file.write(cached.message.split()[0] + "\n")
        time.sleep(seconds)
        assert len(Store.open(cached.path)) == 20


def test_many_ranks_share_one_copy_and_the_last_removes_it(store: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = [FORK.Process(target=use, args=(store, tmp_path / "root", log, 0.3)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert sorted(log.read_text().split()) == ["copied"] + ["using"] * 7
    assert copies(tmp_path / "root") == []


def test_short_uses_that_race_never_lose_the_copy(store: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = [FORK.Process(target=use, args=(store, tmp_path / "root", log, 0.0)) for _ in range(30)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 30


def die_copying(store: Path, root: Path) -> None:
    def copy_some_and_die(source: Path, target: Path, **_: object) -> None:
        target.mkdir()
        shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")
        os.kill(os.getpid(), signal.SIGKILL)

    cache_module.shutil.copytree = copy_some_and_die
    with node_cache(store, [root]):
        pass


def die_using(store: Path, root: Path) -> None:
    with node_cache(store, [root]):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("death", [die_copying, die_using])
def test_after_a_crash_the_next_run_works_and_cleans_up(death, store: Path, tmp_path: Path) -> None:
    victim = FORK.Process(target=death, args=(store, tmp_path))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert len(copies(tmp_path)) == 1
    with node_cache(store, [tmp_path]) as cached:
        assert contents(cached.path) == contents(store)
    assert copies(tmp_path) == []


def test_another_store_removes_what_a_crashed_run_left(store: Path, tmp_path: Path) -> None:
    victim = FORK.Process(target=die_using, args=(store, tmp_path))
    victim.start()
    victim.join()
    write_folder(tmp_path / "source", 3)
    pack(tmp_path / "source", tmp_path / "other", image_size=8)
    with node_cache(tmp_path / "other", [tmp_path]) as cached:
        assert [name for name in copies(tmp_path) if name not in ("source", "other")] == [cached.path.name]


def test_without_space_the_store_is_read_in_place_with_the_numbers(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_free_bytes", lambda _: 300 << 20)
    monkeypatch.setattr(cache_module, "_SPARE_BYTES", 300 << 20)
    with node_cache(store, [tmp_path]) as cached:
        assert cached.path == store
        assert "has 0.29 GiB free, a copy takes 0.00 GiB" in cached.message


def test_a_root_that_cannot_be_written_falls_through_to_the_next(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with node_cache(store, [tmp_path / "file", tmp_path / "good"]) as cached:
        assert tmp_path / "good" in cached.path.parents


def test_a_damaged_copy_is_made_again(store: Path, tmp_path: Path) -> None:
    with node_cache(store, [tmp_path]) as cached:
        (cached.path / "images-00000.npy").write_bytes(b"")
        with node_cache(store, [tmp_path / "x"]) as other:
            assert len(Store.open(other.path)) == 20
    victim = FORK.Process(target=die_using, args=(store, tmp_path))
    victim.start()
    victim.join()
    (copy,) = [path for path in (tmp_path / f"vlfit-cache-{os.getuid()}").iterdir() if path.is_dir()]
    (copy / "images-00000.npy").write_bytes(b"")
    with node_cache(store, [tmp_path]) as cached:
        assert contents(cached.path) == contents(store)


def test_an_error_of_the_training_passes_through_and_the_copy_goes(store: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the training's own"), node_cache(store, [tmp_path]):
        raise OSError("the training's own")
    assert copies(tmp_path) == []
