"""Tests of farspan.report."""
