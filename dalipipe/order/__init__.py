"""Which samples form which step: pure arithmetic of (manifest shape, configuration, seed, epoch, step)."""
