"""The simulator: the decisions of `ampd.core` on modelled workers (docs/simulator.md)."""
