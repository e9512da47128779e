"""Tests of farspan.posttrain."""
