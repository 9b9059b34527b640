"""Tars of somebody else behind a web server: what a node read first, it holds later reads to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dalipipe as dp
from dalipipe.cli import main
from dalipipe.errors import IntegrityError
from dalipipe.packing.config import IndexConfig
from dalipipe.packing.index import index
from dalipipe.packing.verify import verify
from dalipipe.storage.store import StorageConfig
from tests.support.archives import write_tar
from tests.support.webserver import web_server
from tests.unit.packing.reading import open_manifest
from tests.unit.packing.test_sources import samples

NUM = 40


@pytest.fixture
def served(tmp_path):
    """A web server with two tars, and the folder of the manifest over them."""
    tars = {f"set/part-{i}.tar": write_tar(tmp_path / f"{i}.tar", samples(20, first=20 * i)) for i in (0, 1)}
    with web_server({name: path.read_bytes() for name, path in tars.items()}) as server:
        config = IndexConfig(block_bytes="10kB")
        report = index(f"{server.url}/set/part-{{0..1}}.tar", str(tmp_path / "set"), config, StorageConfig())
        assert (report.samples, report.shards, report.checksums) == (NUM, 2, False)
        yield server, tmp_path / "set"


def epoch(url: Path, cache: Path, *words: str) -> list[int]:
    keys = [f"data.url={url}", f"cache.dir={cache}", "data.fields=[image]", "device=cpu", "graph.num_threads=1"]
    # Without cold steps each sample comes out of a whole block.
    with dp.load("train", [*keys, "loader.batch_size=10", "graph.size=32", "prefetch.cold_steps=0", *words]) as loader:
        return sorted(int(i) for batch in loader for i in batch["id"])


def corrupt(server, at: int = 3000) -> None:
    data = bytearray(server.objects["set/part-0.tar"])
    data[at] ^= 1
    server.objects["set/part-0.tar"] = bytes(data)


def clear(cache: Path, *words: str) -> None:
    assert main(["cache", "clear", f"cache.dir={cache}", "--json", *words]) == 0


@pytest.mark.parametrize("policy", ["pin", "stream"])
def test_a_byte_that_changes_at_the_server_is_found_after_the_block_is_gone(served, tmp_path, policy, capsys):
    server, url = served
    cache = tmp_path / "cache"
    words = [f"cache.policy={policy}", f"cache.tiers.memory.dir={tmp_path / 'memory'}"]
    assert epoch(url, cache, *words) == list(range(NUM))
    corrupt(server)
    clear(cache)
    with pytest.raises(IntegrityError, match=r"bytes \[\d+, \d+\) of .*part-0\.tar.*when this node read them first"):
        epoch(url, cache, *words)
    found = verify(str(url), StorageConfig(), cache_dir=str(cache))
    assert found.num_errors == 1
    assert "part-0.tar: bytes [" in found.errors[0]
    assert "this node's first read of them had" in found.errors[0]
    manifest = open_manifest(url)
    assert found.first_reads == found.without_checksum == sum(len(manifest.index(n).parts.starts) for n in (0, 1))
    # Another node has read nothing yet: what it reads first is what holds there.
    assert verify(str(url), StorageConfig(), cache_dir=str(tmp_path / "other"), decode="none").errors == []
    # Replaced on purpose: said so on the node, it is read again.
    clear(cache, "first_reads=true")
    assert epoch(url, cache, *words) == list(range(NUM))


def test_a_pool_that_another_node_filled_is_held_to_it_too(served, tmp_path):
    server, url = served
    words = ["cache.policy=pin", "cache.tiers.node.capacity=0", f"cache.tiers.pool.url={tmp_path / 'pool'}"]
    assert epoch(url, tmp_path / "one", "cache.policy=stream") == list(range(NUM))
    sound = server.objects["set/part-0.tar"]
    corrupt(server)
    assert epoch(url, tmp_path / "two", *words) == list(range(NUM))
    server.objects["set/part-0.tar"] = sound
    keys = [f"data.url={url}", f"cache.dir={tmp_path / 'one'}", "data.fields=[image]", "device=cpu"]
    with dp.load("train", [*keys, "loader.batch_size=10", "graph.size=32", "prefetch.cold_steps=0", *words]) as loader:
        assert sorted(int(i) for batch in loader for i in batch["id"]) == list(range(NUM))
        read = loader.stats()["bytes_read"]
    assert read["pool"] > 0
    assert 0 < read["lake"] < read["pool"], "only the block that differs came from the lake"


def test_what_a_node_read_enters_the_manifest_without_another_read(served, tmp_path, capsys):
    server, url = served
    cache = tmp_path / "cache"
    assert epoch(url, cache) == list(range(NUM))
    identity = open_manifest(url).identity
    before = len(server.requests)
    assert main(["verify", str(url), "checksums=kept", f"cache.dir={cache}", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["without_checksum"], done["errors"]) == (0, [])
    assert done["checksums_added"] > 2
    assert len(server.requests) == before
    manifest = open_manifest(url)
    assert manifest.identity == identity, "caches and states stay valid"
    assert all(extent.digest for block in range(manifest.num_blocks) for extent in manifest.extents(block))
    corrupt(server)
    # On a node that never read it.
    with pytest.raises(IntegrityError, match=r"of .*part-0\.tar have xxh3-64 .*the manifest says"):
        epoch(url, tmp_path / "other")
    found = verify(str(url), StorageConfig())
    assert "the index states" in found.errors[0]


def test_a_mix_knows_the_checksums_that_were_added_to_its_sets(served, tmp_path):
    _, url = served
    index(f"{tmp_path}/{{0,1}}.tar", str(tmp_path / "local"), IndexConfig(), StorageConfig())
    before = {name: open_manifest(tmp_path / name).identity for name in ("set", "local")}
    for name in before:
        assert verify(str(tmp_path / name), StorageConfig(), add_checksums=True).checksums_added > 0
    keys = [f"cache.dir={tmp_path / 'cache'}", "data.fields=[image]", "device=cpu", "loader.batch_size=10"]
    with dp.load("train", [f"data.mix={{{url}:0.5,{tmp_path / 'local'}:0.5}}", *keys]) as loader:
        manifest = loader.manifest
        extents = [extent for block in range(manifest.num_blocks) for extent in manifest.extents(block)]
        assert all(extent.digest for extent in extents)
        assert len({extent.part for extent in extents}) == len(extents)
    assert {name: open_manifest(tmp_path / name).identity for name in before} == before
