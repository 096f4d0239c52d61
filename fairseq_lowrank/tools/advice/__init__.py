"""Advice on an architecture for given data: the papers' bottlenecks that it has, remedies, and their cost."""
