"""Benchmarks behind ``workbench bench``: they record, they assert nothing.

``runner`` knows them by name; ``command`` is the command line; ``against`` compares two runs.
"""
