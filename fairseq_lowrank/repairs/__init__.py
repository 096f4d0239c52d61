"""Repairs of fairseq: with them it runs on this stack, loads safely, resumes exactly and evaluates whole.

``import fairseq_lowrank.repairs`` before fairseq applies the table in :mod:`.patches` and nothing else: no flag, model or layer of this
package, until ``--user-dir`` or an import of ``fairseq_lowrank.plugin`` asks for them.
"""

import sys

from fairseq_lowrank import importing

if f"{importing.PACKAGE}.plugin" not in sys.modules:
    importing.deactivate()
if sys.version_info >= (3, 14):
    importing.import_fairseq()

from fairseq_lowrank.repairs import patch, patches, stack

patch.warn_of_untested_versions()
patch.apply(patches.PATCHES)
stack.quieten_warnings()
