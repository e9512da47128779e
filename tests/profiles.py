"""Profiles of models, for tests that ask for one."""

from dataclasses import replace
from functools import cache
from typing import Any

from farspan.ask import measuring
from farspan.planner.evaluate import stage_model
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import find_profiles, profiles_of
from farspan.spec import ModelSpec


def profile_of(model: str | dict[str, Any], layers: int | None = None, **how: Any) -> ModelProfile:
    """Of a preset or of fields of a configuration, its first so many layers; `how` are fields of
    the variant."""
    if isinstance(model, str):
        profiles = find_profiles(model, measuring)
    else:
        profiles = profiles_of(model, "fields", measuring=measuring)
    return _first(profiles.of(Variant(**how)), layers)


@cache
def _first(found: ModelProfile, layers: int | None) -> ModelProfile:
    if layers is None:
        return found
    spec = stage_model(found.spec, (0, layers))
    return replace(found, spec=spec, kind_of=found.kind_of[:layers])


def spec_of(model: str | dict[str, Any], **how: Any) -> ModelSpec:
    """The description that goes with it."""
    return profile_of(model, **how).spec
