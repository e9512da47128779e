"""Tests of farspan.cli."""
