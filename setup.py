"""For tools that still look for it; everything about the package is in pyproject.toml."""

from setuptools import setup

setup()
