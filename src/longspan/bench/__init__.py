"""Benchmarks: a registry of contenders -> a run -> one JSON file -> tables and figures."""
