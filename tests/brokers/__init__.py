"""Tests of broker targets, each against its server."""
