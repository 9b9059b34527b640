"""dalipipe: the input pipeline that keeps GPUs fed. See README.md."""
