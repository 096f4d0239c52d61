"""Tar archives that are unpacked below their folder only."""

import os
import tarfile


class Archive(tarfile.TarFile):
    """An archive none of whose members is written elsewhere, nor with rights or owners of its own.

    Raises:
        tarfile.TarError: a member would be, when it is unpacked.
    """

    if hasattr(tarfile, "data_filter"):
        extraction_filter = staticmethod(tarfile.data_filter)
    else:  # Python before 3.11.4, Debian 12's: goes with it

        def extract(self, member, path="", set_attrs=True, **options) -> None:
            member = self.getmember(member) if isinstance(member, str) else member
            folder = os.path.realpath(path)
            place = os.path.realpath(os.path.join(folder, member.name))
            if os.path.commonpath((folder, place)) != folder:
                raise tarfile.TarError(f"{member.name!r} would be written to {place!r}, outside the destination")
            if not (member.isreg() or member.isdir()):
                raise tarfile.TarError(f"{member.name!r} is neither a file nor a folder")
            super().extract(member, path, set_attrs=False, **options)
