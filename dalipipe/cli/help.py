"""What `dalipipe VERB --help` says, which Hydra's own help takes seconds for."""

from __future__ import annotations

from collections.abc import Iterable

# By verb: calls that do something, and where it is described.
_EXAMPLES = {
    "demo": ("dalipipe demo", "README.md"),
    "pack": (
        "dalipipe pack source=s3://lake/photos target=s3://bucket/packed\n"
        "  dalipipe pack pack=tars source=wds target=packed pack.workers=8 pack.drop_corrupt=true",
        "docs/packing.md",
    ),
    "index": ("dalipipe index s3://lake/wds", "docs/packing.md"),
    "merge": ("dalipipe merge sources=[s3://bucket/a,s3://bucket/b] target=s3://bucket/both", "docs/packing.md"),
    "preview": ("dalipipe preview s3://bucket/packed graph=image_train", "docs/packing.md"),
    "info": ("dalipipe info s3://bucket/packed --json", "docs/packing.md"),
    "verify": (
        "dalipipe verify s3://bucket/packed decode=all\n"
        "  dalipipe verify s3://bucket/packed repair=true repair_from=s3://copy/packed",
        "docs/packing.md",
    ),
    "bench": ("dalipipe bench s3://bucket/packed graph=image_train bench.epochs=2 bench.step_s=0.1", "docs/graphs.md"),
    "spin": ("dalipipe spin s3://bucket/packed bench.step_s=0.1", "docs/metrics.md"),
    "doctor": ("dalipipe doctor runs/7\n  dalipipe doctor env", "docs/metrics.md"),
    "top": ("dalipipe top runs/7\n  dalipipe top node1:9400-9407", "docs/metrics.md"),
    "report": ("dalipipe report runs/7", "docs/metrics.md"),
    "plan": ("dalipipe plan data.url=s3://bucket/packed plan.gpus=64", "docs/plan.md"),
    "cache": (
        "dalipipe cache stat\n  dalipipe cache warm data.url=s3://bucket/packed\n  dalipipe cache clear",
        "docs/cache.md",
    ),
}


def help_text(verb: str, about: str, groups: Iterable[str], keys: str) -> str:
    """The help of this verb.

    Args:
        about: what the verb does, in a line.
        groups: of files to choose from, as `graph=image_eval|image_train`.
        keys: all keys with their values, as YAML.
    """
    example, page = _EXAMPLES[verb]
    choices = "".join(f"  {group}\n" for group in groups)
    choices = f"\nChoices:\n{choices}" if choices else ""
    return (
        f"dalipipe {verb}: {about}\n\n  {example}\n{choices}\n"
        f"Keys and their values, each to be overridden with key=value (key.part=value):\n\n{keys}\n"
        f"--json prints one JSON object. More: {page}. --hydra-help lists Hydra's own flags."
    )
