"""Show the `Example:` of a docstring as code on the reference page.

Griffe takes `Examples:` for a section of doctests and `Example:` for prose, in which Markdown makes
a quotation of `>>>` and a broken link of a list.
"""

import re

from griffe import Extension, Object

HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class ExampleSection(Extension):
    """Rename the heading while the docstring is read for the page."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = HEADING.sub(r"\1Examples:", obj.docstring.value)
