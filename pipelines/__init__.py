"""Artifacts to artifacts, by date: ingestion, generated logs, reports."""
