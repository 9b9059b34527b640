"""What comes beside the pixels: labels, text and numbers out of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from dalipipe.errors import ConfigError, CorruptSampleError
from dalipipe.graphs.config import GraphConfig
from dalipipe.graphs.contract import Batch
from dalipipe.graphs.fields import split_bytes
from tests.unit.graphs.steps import MemoryPrefetcher, open_memory, png_bytes, sized_jpegs


def _first(graph: GraphConfig, fields: Sequence[str], columns: dict[str, Sequence[bytes]], num: int = 4) -> Batch:
    source = open_memory(MemoryPrefetcher(sized_jpegs(num), num, fields=columns), graph=graph, fields=fields)
    try:
        return next(source)
    finally:
        source.close()


def test_text_stays_bytes_with_offsets() -> None:
    """Any length, any bytes, none at all; together with augmented images."""
    captions = [b"a red fox", b"", "ein Füchschen 🦊".encode(), b"\xff\x00raw"]
    graph = GraphConfig(name="multimodal", size=32, flip=0, scale=[0.9, 1.0], num_threads=2)
    batch = _first(graph, ["image", "text"], {"text": captions})
    assert batch.tensors["image"].shape == (4, 3, 32, 32)
    assert batch.tensors["text"].dtype == torch.uint8
    assert batch.tensors["text_offsets"].dtype == torch.int64
    assert split_bytes(batch.tensors, "text") == captions


def test_a_substitute_brings_its_own_caption() -> None:
    images = sized_jpegs(4)
    images[1] = png_bytes(0, damaged=True)
    captions = [b"zero", b"one", b"two", b"three"]
    source = open_memory(
        MemoryPrefetcher(images, 4, fields={"text": captions}),
        graph=GraphConfig(name="multimodal", size=32, num_threads=1),
        fields=["image", "text"],
    )
    batch = next(source)
    source.close()
    assert split_bytes(batch.tensors, "text") == [b"zero", b"two", b"two", b"three"]


def test_several_labels_become_columns() -> None:
    graph = GraphConfig(size=32, labels="multi_hot", num_classes=5, num_threads=1)
    batch = _first(graph, ["image", "label"], {"label": [b"3", b"0 4", b"", b"1,2, 4\n"]})
    wanted = [[0, 0, 0, 1, 0], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]]
    assert torch.equal(batch.tensors["label"], torch.tensor(wanted, dtype=torch.float32))


@pytest.mark.parametrize("label", [b"5", b"-1", b"fox", b"1 2.5"])
def test_labels_outside_the_classes_name_their_sample(label: bytes) -> None:
    graph = GraphConfig(size=32, labels="multi_hot", num_classes=5, num_threads=1)
    with pytest.raises(CorruptSampleError, match=r"labels of sample 2 are .*not integers in \[0, 5\)"):
        _first(graph, ["image", "label"], {"label": [b"0", b"1", label, b"2"]})


def _documents(num: int = 4) -> list[bytes]:
    return [
        json.dumps(
            {"score": i / 4, "year": 2000 + i, "ok": i % 2 == 0, "box": {"corners": [[i, 2], [3, 4.5]]}}
        ).encode()
        for i in range(num)
    ]


def test_numbers_out_of_json() -> None:
    """Scalars and lists of one shape, nested by dots; the bytes come too."""
    wanted = {"score": "float32", "year": "int64", "ok": "bool", "box.corners": "float32", "box.corners.1.0": "int64"}
    graph = GraphConfig(size=32, json_fields=wanted, num_threads=1)
    tensors = _first(graph, ["image", "json"], {"json": _documents()}).tensors
    assert torch.equal(tensors["score"], torch.tensor([0, 0.25, 0.5, 0.75]))
    assert torch.equal(tensors["year"], torch.arange(2000, 2004))
    assert tensors["ok"].tolist() == [True, False, True, False]
    assert tensors["box.corners"].shape == (4, 2, 2)
    assert tensors["box.corners"][2].tolist() == [[2, 2], [3, 4.5]]
    assert tensors["box.corners.1.0"].tolist() == [3] * 4
    assert split_bytes(tensors, "json") == _documents()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"{", "json of sample 1 cannot be parsed"),
        (b"{}", "json of sample 1 has no 'box.side'"),
        (b'{"box": [1]}', "json of sample 1 has no 'box.side'"),
        (b'{"box": {"side": "wide"}}', "json of sample 1: 'box.side' is 'wide', not int64"),
        (b'{"box": {"side": 1.5}}', "is '1.5', not int64"),
        (b'{"box": {"side": [1, 2]}}', r"has shape \(2,\), other samples of the batch \(\)"),
        (b'{"box": {"side": [[1], [2, 3]]}}', "not int64"),
    ],
)
def test_json_that_does_not_fit_names_its_sample(document: bytes, message: str) -> None:
    graph = GraphConfig(size=32, json_fields={"box.side": "int64"}, num_threads=1)
    good = b'{"box": {"side": 1}}'
    with pytest.raises(CorruptSampleError, match=message):
        _first(graph, ["image", "json"], {"json": [good, document, good, good]})


@pytest.mark.parametrize(
    ("graph", "fields", "message"),
    [
        (GraphConfig(name="multimodal"), ["image", "label"], "with text or json in it for graph=multimodal"),
        (GraphConfig(labels="multi_hot"), ["image", "label"], "graph.num_classes=0 must be at least 1"),
        (GraphConfig(labels="many"), ["image"], "graph.labels='many' is not one of single, multi_hot"),
        (GraphConfig(json_fields={"a": "int64"}), ["image"], "with 'json' in it for graph.json_fields"),
        (GraphConfig(json_fields={"a": "int8"}), ["image", "json"], r"json_fields\['a'\]='int8' must be int64 or"),
        (GraphConfig(json_fields={"image": "int64"}), ["image", "json"], "a name that the batch does not have"),
    ],
)
def test_fields_that_cannot_be_are_refused(graph: GraphConfig, fields: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_memory(MemoryPrefetcher(sized_jpegs(2), 2), graph=graph, fields=fields)
