"""Tests of jact, as a package so that they can share helpers."""
