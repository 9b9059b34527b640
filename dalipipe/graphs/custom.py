"""Graphs of the user's own, by dotted path.

    def graph(jpeg, draws, config, backend) -> DALI node, or {name: DALI node}

jpeg: the encoded images. draws: float32 [config.num_draws] a sample, uniform in [0, 1), from (seed, epoch, sample id).
config: the `GraphConfig`, with `config.args`. backend: where it runs; hand it to `dalipipe.graphs.image.decode`, which
gives the pixels on the right device. A single node is `image`. A node whose samples have one shape becomes a tensor
[b, …], any other a list of b tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dalipipe.errors import ConfigError
from dalipipe.graphs.config import GraphConfig

UserGraph = Callable[[Any, Any, GraphConfig, str], Any]


def is_custom(name: str) -> bool:
    """Whether a graph's name is the dotted path of a user's function."""
    return "." in name


def load_graph(name: str) -> UserGraph:
    """The function at a dotted path.

    Raises:
        ConfigError: there is no such module or function.
    """
    module_name, _, function_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ConfigError(
            f"graph.name={name!r}: {error}; give package.module.function of a module that Python can import "
            "(PYTHONPATH)"
        ) from error
    except AttributeError:
        raise ConfigError(f"graph.name={name!r}: module {module_name} has no {function_name!r}") from None
    if not callable(found):
        raise ConfigError(f"graph.name={name!r} is a {type(found).__name__}, not a function")
    graph: UserGraph = found
    return graph


def outputs_of(name: str, found: Any) -> dict[str, Any]:
    """What a user's graph returned, by name.

    Raises:
        ConfigError: it is neither a node nor a dictionary with `image` in it.
    """
    from nvidia.dali.data_node import DataNode

    outputs = {"image": found} if isinstance(found, DataNode) else found
    if not isinstance(outputs, dict) or not all(isinstance(node, DataNode) for node in outputs.values()):
        raise ConfigError(f"graph.name={name!r} returned {type(found).__name__}; return a DALI node or {{name: node}}")
    if "image" not in outputs or "id" in outputs:
        raise ConfigError(f"graph.name={name!r} returned {sorted(outputs)}; `image` must be among them, `id` must not")
    return outputs


def check_stateless(name: str, kinds: list[str]) -> None:
    """Refuses DALI's own random operators: they would make a sample depend on its batch, its rank and on restarts.

    Raises:
        ConfigError: names the operator.
    """
    from nvidia.dali import backend as _backend

    backend: Any = _backend

    for kind in kinds:
        schema = backend.TryGetSchema(kind)
        if schema is not None and schema.HasRandomSeedArg():
            raise ConfigError(
                f"graph.name={name!r} uses {kind}, which draws its own random numbers, so that a sample would look "
                "different in another batch, at another rank or after a restart; compute it from `draws`"
            )
