"""`dalipipe.load`: a loader from a named configuration and Hydra overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dalipipe.build import LoadConfig, Loader
from dalipipe.cli.compose import compose
from dalipipe.errors import ConfigError
from dalipipe.world import World


def load(
    name: str = "train",
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    world: World | None = None,
) -> Loader:
    """Composes the primary config `name` and opens the loader that it describes.

    Args:
        name: `train`, `eval` or `multimodal`, or a config of your own in `config_dir`.
        overrides: Hydra overrides: `["data.url=s3://bucket/set", "loader.batch_size=256", "graph=image_eval"]`.
        config_dir: a folder of your own YAML; the shipped groups stay available.
        world: this process's place in the job; by default from `RANK`, `WORLD_SIZE` … or torch.distributed.

    Raises:
        ConfigError: an unknown key (the nearest one is named), a wrong type, values that cannot work together.
        ManifestError, StorageError: the data set cannot be opened.
    """
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(f"overrides must be a list of strings; write load({name!r}, ['KEY=VALUE', …])")
    cfg = compose(name, list(overrides), directory=config_dir)
    if not isinstance(cfg, LoadConfig):
        raise ConfigError(
            f"config {name!r} belongs to a command, not to a loader; use 'train', 'eval', 'multimodal' or your own"
        )
    return Loader(cfg, world=world)
