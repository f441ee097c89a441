"""Projections around one op: tokens in, tokens out."""
