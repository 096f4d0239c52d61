"""Measure which directions the heads of a trained model use, and what a cut to fewer directions costs."""
