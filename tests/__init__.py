"""The tests mirror `src/farspan`; helpers shared by them are modules of this package."""
