"""The composition root: a loader wired from plain configuration. With `dalipipe.wiring` it alone knows every room."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from dalipipe.loader.loader import Loader as _Loader
from dalipipe.telemetry import Recorder
from dalipipe.wiring.config import LoadConfig
from dalipipe.wiring.parts import open_parts, start_source
from dalipipe.world import World, detect_world

__all__ = ["LoadConfig", "Loader"]


class Loader(_Loader):
    """A `dalipipe.loader` wired from a configuration: what `dalipipe.load` returns.

    Args:
        cfg: as composed by `dalipipe.load`, or made by hand.
        world: this process's place in the job; read from the launcher's variables by default.

    Raises:
        ConfigError: values that can never work together; names the keys and the nearest valid values.
        ManifestError: there is no data set at `data.url`, or it is torn.
        StorageError: `data.url` cannot be read.
    """

    def __init__(self, cfg: LoadConfig, *, world: World | None = None) -> None:
        world = world or detect_world()
        parts = open_parts(cfg, world)
        super().__init__(
            start=partial(start_source, parts),
            num_steps=parts.order(0).num_steps,
            identity=parts.manifest.identity,
            order=parts.order(0).signature,
            batch_size=parts.batch_size,
            device=parts.device,
            ahead=cfg.prefetch.device_batches,
            timeout_s=cfg.prefetch.timeout_s,
            recorder=parts.recorder,
            publisher=parts.publisher,
            waited_on=(parts.store,),
            owned=parts.owned,
        )
        self.manifest = parts.manifest
        self._tier = parts.tier
        try:
            self._watch(cfg, parts.recorder, world)
            if parts.resumed is not None:
                self.load_state_dict(parts.resumed.state)
        except BaseException:
            self.close()
            raise

    def release_device_cache(self, num_bytes: int | None = None) -> int:
        """Gives GPU memory of `cache.tiers.device` back to the model; see `DeviceTier.release`. From any thread.

        Args:
            num_bytes: at least so many; None = all.

        Returns: the bytes that were freed; 0 where there is no such tier.
        """
        return 0 if self._tier is None else self._tier.release(num_bytes)

    def _watch(self, cfg: LoadConfig, recorder: Recorder, world: World) -> None:
        from dalipipe.metrics.attach import watch

        watching = watch(
            config=cfg.metrics,
            settings=asdict(cfg),
            recorder=recorder,
            steps=self.steps,
            world=world,
            manifest=self.manifest,
            device=self.device,
            run_dir=Path(cfg.run_dir) if cfg.run_dir else None,
        )
        for item in watching:
            self.own(item)
