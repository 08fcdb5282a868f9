"""A short summary of a record for the terminal: the time of each provider, and the limit of the device."""

from collections.abc import Iterator, Sequence

from bench.gpu.journal import Entry

FIGURES = {"median_s": "", "replay_s": "replayed ", "copy_s": "copies "}


def summary(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a line for each op and shape: all providers, the fastest first, those that did not run last."""
    groups: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries:
        if entry["kind"] in ("row", "replay"):
            rows = groups.setdefault((entry["op"], entry["shape"]), {})
            rows[entry["provider"]] = rows.get(entry["provider"], {}) | entry
    for (op, shape), rows in groups.items():
        ordered = sorted(rows.values(), key=lambda row: row.get("median_s") or float("inf"))
        yield f"{op}, {shape}: {'; '.join(map(told, ordered))}"
    for entry in entries:
        if entry["kind"] == "stage" and "took_s" in entry:
            yield f"stage {entry['stage']}: {entry['took_s']} s"


def told(row: Entry) -> str:
    """Return the figures of a provider, in microseconds and gigabytes."""
    parts = [f"{name}{row[key] * 1e6:,.0f}" for key, name in FIGURES.items() if row.get(key) is not None]
    if row.get("peak_bytes"):
        parts.append(f"{row['peak_bytes'] / 1e9:.2f} GB")
    if row.get("error") is not None and row.get("allowed"):
        parts.append(f"error {row['error'] / row['allowed']:.2f} of allowed")
    if not parts or not row.get("ok"):
        parts.append(str(row.get("missing") or "WRONG")[:60])
    return f"{row['provider']} {', '.join(parts)}"
