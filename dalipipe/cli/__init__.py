"""The command line: `dalipipe VERB [key=value …]`, one file a verb. The only room that imports Hydra."""

from dalipipe.cli.entry import main

__all__ = ["main"]
