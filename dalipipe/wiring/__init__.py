"""From plain configuration to the parts of a loader, one file a kind of part; `dalipipe.build` puts them together."""
