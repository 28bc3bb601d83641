"""Trying the service's promises on purpose: harmful streams, crashes, load and bad requests."""
