"""What is near: blocks on the node's disk, in memory while they are held, and from the lake otherwise."""
