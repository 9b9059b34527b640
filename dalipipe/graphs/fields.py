"""The fields of a batch that are not pixels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dalipipe.errors import CorruptSampleError
from dalipipe.order.step import Bytes

if TYPE_CHECKING:
    import torch

JSON_DTYPES = {"int64": np.int64, "float32": np.float32, "bool": np.bool_}


def label_tensor(views: Sequence[Bytes], name: Callable[[int], str]) -> torch.Tensor:
    """int64 [b] from labels as ASCII decimals. name: what messages call the sample of a row.

    Raises:
        CorruptSampleError: a label is not an integer of 64 bits; names the sample.
    """
    import torch

    labels = np.empty(len(views), np.int64)
    for row, view in enumerate(views):
        text = view.tobytes()
        try:
            labels[row] = int(text)
        except (ValueError, OverflowError):
            raise CorruptSampleError(
                f"label of {name(row)} is {text[:40]!r}, not an integer; mend the data set, leave `label` "
                "out of data.fields, or use graph.labels=multi_hot where samples have several"
            ) from None
    return torch.from_numpy(labels)


def multi_hot_tensor(views: Sequence[Bytes], name: Callable[[int], str], num_classes: int) -> torch.Tensor:
    """float32 [b, num_classes] of 0 and 1 from labels as ASCII decimals with spaces or commas between; none is legal.

    Raises:
        CorruptSampleError: a label is not an integer in [0, num_classes); names the sample.
    """
    import torch

    labels = torch.zeros(len(views), num_classes)
    for row, view in enumerate(views):
        words = view.tobytes().replace(b",", b" ").split()
        try:
            columns = [int(word) for word in words]
        except ValueError:
            columns = [-1]
        if any(not 0 <= column < num_classes for column in columns):
            raise CorruptSampleError(
                f"labels of {name(row)} are {view.tobytes()[:40]!r}, not integers in [0, {num_classes}); "
                "mend the data set, or raise graph.num_classes"
            )
        labels[row, columns] = 1
    return labels


def json_tensors(
    views: Sequence[Bytes], name: Callable[[int], str], fields: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """One tensor a dotted path, [b, …], from JSON objects. A number between the dots counts in a list.

    Raises:
        CorruptSampleError: no JSON, no such path, not a number of that type, or shapes that differ; names the sample.
    """
    import torch

    found: dict[str, list[npt.NDArray[Any]]] = {path: [] for path in fields}
    for row, view in enumerate(views):
        where = f"json of {name(row)}"
        try:
            document = json.loads(view.tobytes())
        except ValueError as error:
            raise CorruptSampleError(f"{where} cannot be parsed: {error}; mend the data set") from None
        for path, dtype in fields.items():
            value = _numbers(_walk(document, path, where), dtype, f"{where}: {path!r}")
            if found[path] and value.shape != found[path][0].shape:
                raise CorruptSampleError(
                    f"{where}: {path!r} has shape {value.shape}, other samples of the batch {found[path][0].shape}; "
                    "a tensor needs one shape: take the bytes of `json` instead"
                )
            found[path].append(value)
    return {
        path: torch.from_numpy(np.stack(values) if values else np.empty(0, JSON_DTYPES[fields[path]]))
        for path, values in found.items()
    }


def bytes_tensors(field: str, views: Sequence[Bytes]) -> dict[str, torch.Tensor]:
    """`field`: uint8 [total], all samples one after the other; `field_offsets`: int64 [b + 1], where each begins."""
    import torch

    offsets = np.zeros(len(views) + 1, np.int64)
    np.cumsum([len(view) for view in views], out=offsets[1:])
    joined = np.concatenate(views) if views else np.empty(0, np.uint8)
    return {field: torch.from_numpy(joined), f"{field}_offsets": torch.from_numpy(offsets)}


def split_bytes(batch: Mapping[str, Any], field: str) -> list[bytes]:
    """The bytes of each sample of a batch, from `field` and `field_offsets`.

    >>> captions = [text.decode() for text in split_bytes(batch, "text")]

    Raises:
        KeyError: the batch has no such bytes field.
    """
    joined, offsets = batch[field].cpu().numpy(), batch[f"{field}_offsets"].tolist()
    return [joined[start:stop].tobytes() for start, stop in itertools.pairwise(offsets)]


def _walk(document: Any, path: str, where: str) -> Any:
    value = document
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise CorruptSampleError(
                f"{where} has no {path!r} (nothing at {part!r}); mend the data set or graph.json_fields"
            ) from None
    return value


def _numbers(value: Any, dtype: str, where: str) -> npt.NDArray[Any]:
    try:
        found = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        found = np.asarray(None)
    kinds = {"int64": "i", "float32": "if", "bool": "b"}[dtype]
    if found.dtype.kind not in kinds and found.size:
        raise CorruptSampleError(f"{where} is {str(value)[:40]!r}, not {dtype}; mend the data set or graph.json_fields")
    return found.astype(JSON_DTYPES[dtype])
