"""Calibration, stores and trimmed vocabularies: fitted, not trained."""
