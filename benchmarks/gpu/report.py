"""The kit's results as a page of markdown."""

from __future__ import annotations

from typing import Any

_HIDDEN = {"ok", "why", "rows", "facts", "skipped", "traceback", "section_s"}


def markdown(results: dict[str, Any]) -> str:
    """A table of verdicts, the host, the sweep; figures belong to the card and versions above them."""
    sections = results["sections"]
    kind = "quick run" if results["quick"] else "full run"
    lines = [
        f"# GPU kit on {results['device']} ({kind}, {results.get('wall_s', 0)} s)",
        "",
        f"`{results['command']}`",
        "",
    ]
    lines += _host(sections.get("environment", {}))
    lines += ["| section | verdict | figures |", "|---|---|---|"]
    for name, result in sections.items():
        verdict = {True: "held", False: "FAILED", None: "not here"}[result.get("ok")]
        figures = [f"{key} {value}" for key, value in result.items() if key not in _HIDDEN]
        why = [result["why"]] if result.get("why") else []
        lines.append(f"| {name} | {verdict} | {_cell('; '.join(why + figures))} |")
    rows = sections.get("sweep", {}).get("rows", [])
    if rows:
        lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _host(environment: dict[str, Any]) -> list[str]:
    facts = environment.get("facts")
    if not facts:
        return []
    gpu, packages = facts["gpu"], facts["packages"]
    shown = {
        "devices": "; ".join(gpu["devices"]) or "no GPU",
        "driver": gpu["driver"] or "none",
        "torch": facts["torch"].get("version", "none"),
        "DALI": next((f"{name} {packages[name]}" for name in packages if name.startswith("nvidia-dali")), "none"),
        "nvImageCodec": next((packages[name] for name in packages if name.startswith("nvidia-nvimgcodec")), "none"),
        "CPUs": facts["host"]["cpus"],
        "processor": facts["host"]["processor"],
        "python": facts["host"]["python"].split()[0],
    }
    return [", ".join(f"{name}: {value}" for name, value in shown.items()), ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
