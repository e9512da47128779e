"""Tests of farspan.data."""
