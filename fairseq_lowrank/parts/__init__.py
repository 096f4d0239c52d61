"""What a part of a layer is: a base class for each axis. A part imports torch, ``ops`` and this package alone."""
