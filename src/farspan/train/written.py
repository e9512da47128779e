"""What a run file may write in the words that the command line takes: 128K, bf16, on."""

from collections.abc import Mapping
from typing import Any

from farspan.plan.cell.describe import SHORT_NAMES
from farspan.plan.pages import read_pages
from farspan.plan.units import read_tokens

# By their section; the file itself is the section "".
TOKENS = {
    "": ("context",),
    "schedule": ("chunk", "kv_block", "head_tokens", "mlp_tokens"),
    "sparse": ("page", "budget", "recent"),
}


def in_plain_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run file as `farspan.train.config` has them. Raises Refused naming the
    field."""
    values = dict(given)
    if isinstance(values.get("sparse"), bool):  # YAML reads on and off so
        values["sparse"] = {} if values["sparse"] else None
    if values.get("report_to") == "none":  # as transformers has it
        values["report_to"] = None
    for section, names in TOKENS.items():
        if not section:
            values |= _tokens(values, names, "")
        elif isinstance(values.get(section), Mapping):
            values[section] = _tokens(values[section], names, f"{section}.")
    model = values.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("dtype"), str):
        values["model"] = {**model, "dtype": SHORT_NAMES.get(model["dtype"], model["dtype"])}
    return values


def _tokens(values: Mapping[str, Any], names: tuple[str, ...], where: str) -> dict[str, Any]:
    """Text in place of a number of tokens is read; all else stays for the types to judge."""
    read = read_pages if where == "sparse." else read_tokens
    texts = {n: values[n] for n in names if isinstance(values.get(n), str)}
    return {**values, **{name: read(text, where + name) for name, text in texts.items()}}
