"""Colours as people with a common colour blindness see them: Machado, Oliveira and Fernandes 2009, severity 1."""

import numpy as np
from matplotlib.colors import to_rgb

VIEWS = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    "no colour blindness": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


def lab(colour, view: str) -> np.ndarray:
    """Return CIELAB of a colour of matplotlib, as it is seen."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VIEWS[view]) @ linear, 0, 1)
    ratio = np.array(TO_XYZ) @ seen / np.array(WHITE)
    x, y, z = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(first, second) -> float:
    """Return the least CIE76 distance of two colours over all views."""
    return min(float(np.linalg.norm(lab(first, view) - lab(second, view))) for view in VIEWS)
