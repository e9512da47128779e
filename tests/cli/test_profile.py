"""`farspan profile` from end to end."""

import json
from pathlib import Path

from typer.testing import CliRunner

from farspan.cli import app


def test_profile_shows_what_a_model_costs(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    fields = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    file.write_text(json.dumps(fields | heads))
    shown = CliRunner().invoke(app, ["profile", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "3 layers: 7,744 parameters" in shown.output
    # q, k, v, o and three of the MLP.
    assert f"{2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48):,} FLOP" in shown.output
    values = json.loads(CliRunner().invoke(app, ["profile", str(file), "--json"]).output)
    assert values["spec"]["hidden"] == 32
    assert values["kind_of"] == [0, 0, 0]
