"""Spans of host and device on one clock, and the numbers that follow from them.

Imports neither the engine nor the workbench. ``docs/metrics.md`` defines every
name, category and number used here.
"""
