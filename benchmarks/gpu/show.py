"""A record as tables of text. What was not measured is an empty place."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.work import LOGPROBS, QLORA
from farspan.planner.machines import preset_of_gpu

Row = Mapping[str, Any]

GIB = 2**30
GIGA, TERA = 1e9, 1e12
# OOMB, Table 2: 4K chunks, checkpoints and offload, one H200, batch 1, the best of three runs.
PUBLISHED_ON = "h200"
PUBLISHED = {131072: 260.4, 262144: 985.8}


def text(record: Row) -> str:
    """Everything that a record says."""
    rows = record["measurements"]
    parts = [
        ("ceilings", ceilings(rows)),
        ("main memory at the start, GiB", main_memory(record)),
        ("steps", steps(rows)),
        ("exact steps beside Hugging Face's best", beside(rows)),
        ("beside the published record", published(rows, record.get("machine", {}).get("gpu"))),
        ("the update, which is in no step", updates(rows)),
        ("Hugging Face's longest context", longest(rows)),
        ("where the time of a step goes", gaps(rows)),
        ("gradients in bf16: error against fp64 over plain PyTorch's", exact(rows)),
        ("the device ran out: planned again with less of it", ran_out(rows)),
        ("not completed", failures(rows)),
        ("skipped", skipped(record)),
    ]
    return "\n\n".join(f"{title}\n{body}" for title, body in parts if body)


def steps(rows: Iterable[Row]) -> str:
    seconds = ("s", "all s", "planned s", "floor s", "tokens/s", "MFU", "MHz", "W")
    head = ("step", "layers", *seconds, "GiB", "planned GiB", "reserved GiB", "host GiB")
    body = []
    for row in rows:
        if "planned" not in row or row.get("seconds") is None:
            continue
        last, planned, card = row["runs"][-1], row["planned"], row.get("card") or {}
        body.append(
            (
                row["name"],
                f"{row['layers']} of {row['of_layers']}",
                f"{row['seconds']:.2f}",
                " ".join(f"{run['seconds']:.2f}" for run in row["runs"]),
                f"{planned['seconds']:.2f}",
                number(row["floor_seconds"], 2),
                f"{row['tokens_a_second']:.0f}",
                f"{row['mfu']:.1%}",
                number(card.get("clock_mhz"), 0),
                number(card.get("watts"), 0),
                number(last["allocated"], 1, GIB),
                number(planned["device_bytes"], 1, GIB) if row["work"] == "step" else "",
                number(last["reserved"], 1, GIB),
                number(last["host"], 1, GIB),
            )
        )
    return table(head, body)


def beside(rows: Sequence[Row]) -> str:
    """Only steps of all layers: what was scaled is compared with nothing. Sparse attention, which
    approximates, is no exact step."""
    whole = [row for row in rows if is_whole(row)]
    body = []
    for model, tokens in sorted({(row.get("model", ""), row["tokens"]) for row in whole}):
        at = [row for row in whole if (row.get("model", ""), row["tokens"]) == (model, tokens)]
        own = best(row for row in at if is_exact(row))
        other = best(row for row in at if row["work"] == "huggingface")
        words = ["", ""]
        if own is not None:
            words[0] = own["name"].rpartition(" at ")[0].removeprefix(f"{model} ")
        if other is not None:
            words[1] = other["name"].partition(", ")[2]
        mine, theirs = (None if row is None else float(row["seconds"]) for row in (own, other))
        shown = number(mine, 2), number(theirs, 2), ratio(mine, theirs)
        body.append((f"{model} {tokens}".strip(), *shown, *words))
    return table(
        ("tokens", "farspan s", "Hugging Face s", "ratio", "farspan", "Hugging Face"), body
    )


def published(rows: Iterable[Row], gpu: str | None) -> str:
    """Nothing on another card than the published one."""
    if gpu is None or preset_of_gpu(gpu) != PUBLISHED_ON:
        return ""
    body = []
    for tokens, seconds in PUBLISHED.items():
        own = best(r for r in rows if is_headline(r) and r["tokens"] == tokens and is_whole(r))
        if own is not None:
            mine = own["seconds"]
            body.append((str(tokens), f"{mine:.2f}", f"{seconds:.1f}", ratio(seconds, mine)))
    return table(("tokens", "farspan s", "OOMB s, best of three", "times faster"), body)


def is_exact(row: Row) -> bool:
    """Whether it is a step of farspan's by the mean loss of all weights, which approximates
    nothing."""
    others = row.get("strategy") in (QLORA, LOGPROBS)
    sparse = row["work"] == "step" and row["planned"]["schedule"].get("sparse") is not None
    return row["work"] == "step" and not others and not sparse


def is_headline(row: Row) -> bool:
    """Whether that is of the record's own model, too."""
    return not row.get("model") and is_exact(row)


def is_whole(row: Row) -> bool:
    return row.get("seconds") is not None and row["layers"] == row["of_layers"]


def best(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: float(row["seconds"]), default=None)


def updates(rows: Iterable[Row]) -> str:
    body = []
    for row in rows:
        for one in row["rows"] if row["work"] == "update" else ():
            if "parameters" in one:
                layers = f"{one['layers']} of {one['of_layers']}"
                count = f"{one['parameters'] / GIGA:.2f}"
                shown = " ".join(f"{seconds:.2f}" for seconds in one["seconds"])
                place = f"{one['states']} ({one['reason']})"
                body.append((place, layers, count, shown, f"{one['planned_seconds']:.2f}"))
    return table(("states", "layers", "parameters, 1e9", "s of each", "planned s"), body)


def longest(rows: Iterable[Row]) -> str:
    for row in rows:
        if row["work"] == "longest":
            found: dict[str, Any] = {}
            tried = [r for r in row["rows"] if "tokens" in r]
            for one in row["rows"]:
                found |= one
            if "longest" not in found:
                most = max((r["tokens"] for r in tried if r["ended"] == "fits"), default=0)
                return f"at least {most} tokens; the search did not end"
            fails = found["fails_at"]
            end = f"{fails} fail: {found['why']}" if fails else "the time ended before one failed"
            return f"{found['longest']} tokens; {end}"
    return ""


def gaps(rows: Iterable[Row]) -> str:
    for row in rows:
        if row.get("gap"):
            where = f"{row['tokens']} tokens, {row['layers']} layers"
            keys = ("measured", "floor", "again", "slower")
            sums = {key: sum(line[key] for line in row["gap"]) for key in keys}
            body = [
                (line["part"], *(f"{line[key]:.3f}" for key in keys))
                for line in (*row["gap"], {"part": "all", **sums})
            ]
            return table((where, "s", "floor", "computed again", "slower"), body)
    return ""


def exact(rows: Iterable[Row]) -> str:
    body = []
    for row in rows:
        if row["work"] == "exact":
            for one in row["rows"]:
                ended = f"{one['ratio']:.2f}" if "ratio" in one else one["words"]
                worst = f"{one['worst_ratio']:.2f}" if "worst_ratio" in one else ""
                within = "yes" if one["within"] else "NO"
                body.append((one["strategy"], str(one["tokens"]), ended, worst, within))
    return table(("strategy", "tokens", "all", "worst parameter", "within 2"), body)


def ceilings(rows: Iterable[Row]) -> str:
    body = []
    for row in rows:
        if row["work"] != "ceilings":
            continue
        for one in row["rows"]:
            if "product" in one:
                p = one["product"]
                rates = [f"{p['flop'] / s / TERA:.0f}" for s in p["seconds"].values()]
                shape = f"{p['tokens']} x {p['inner']} x {p['outer']}"
                body.append((f"product {shape}", "TFLOP/s y, dx, dW", " ".join(rates)))
            if "attention" in one:
                a = one["attention"]
                words = "causal" if a["causal"] else "whole"
                found = [a[w]["flop_a_second"] / TERA for w in ("forward", "backward") if w in a]
                shown = " ".join(f"{rate:.0f}" for rate in found) or a["words"][:60]
                name = f"attention {a['queries']} x {a['keys']} {words}, {a['backend']}"
                body.append((name, "TFLOP/s forward, backward", shown))
            if "machine_file" in one:
                m = one["machine_file"]
                for name in ("fetch", "evict", "fetch_together", "evict_together"):
                    body.append((name, "GB/s", f"{m[name] / 1e9:.1f}"))
    return table(("", "unit", "measured"), body)


def main_memory(record: Row) -> str:
    """Of the latest run."""
    found = record["runs"][-1].get("main_memory", {}) if record["runs"] else {}
    words = [f"{name} {size / GIB:.1f}" for name, size in found.items() if size is not None]
    return f"  {', '.join(words)}" if words else ""


def ran_out(rows: Iterable[Row]) -> str:
    body = []
    for row in rows:
        before = row.get("ran_out_before")
        if before is not None:
            planned = (number(p["device_bytes"], 1, GIB) for p in (before, row["planned"]))
            rooms = f"{before['room']:.0%}", f"{row['room']:.0%}"
            body.append((row["name"], *rooms, *planned, row["child"]["ended"]))
    head = ("measurement", "of the device", "then", "planned GiB", "then", "ended")
    return table(head, body)


def failures(rows: Iterable[Row]) -> str:
    body = [
        (row["name"], row["child"]["ended"], row["child"]["words"].splitlines()[-1][:100])
        for row in rows
        if row["child"]["ended"] != "completed" and row["child"]["words"]
    ]
    return table(("measurement", "ended", "last words"), body)


def skipped(record: Row) -> str:
    runs = record["runs"]
    return (
        "\n".join(f"  {one['name']}: {one['why']}" for one in runs[-1]["skipped"]) if runs else ""
    )


def number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def ratio(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.2f}"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; empty without rows."""
    if not body:
        return ""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = []
    for row in (head, *body):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
