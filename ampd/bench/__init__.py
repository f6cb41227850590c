"""Benchmarks that one command each runs (`ampdctl bench`): what is measured, and its results."""
