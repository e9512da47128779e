"""Tests of farspan.train."""
