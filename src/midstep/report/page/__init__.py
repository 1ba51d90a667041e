"""The page: a run, or several over each other, as one file that opens offline.

    runs -> panels (`panels`: what is drawn, of which columns) -> charts (`charts`: how, in altair)
      -> one file of HTML (`html`), or the same charts as pictures (`pictures`)

altair and vl-convert are imported here and nowhere else.
"""

from __future__ import annotations

from .html import write_page
from .pictures import write_pictures
from .serving import serving

__all__ = ["serving", "write_page", "write_pictures"]
