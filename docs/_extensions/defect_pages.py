"""Pages of the defects, written from the catalogue while the site is built; none is committed.

`defects/index.md` lists all by group; `defects/MS101.md` and so on explain one each, with the bad
and the good code that the tests run.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from midstep.defects import CATALOGUE, GROUPS, SETUP, Defect

TOOLS = {"lint": "`midstep lint`", "audit": "`midstep audit`", "verify": "`midstep verify`"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Called by mkdocs once it knows the files of the site."""
    pages = {"defects/index.md": index()}
    pages |= {f"defects/{defect.code}.md": page(defect) for defect in CATALOGUE}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def index() -> str:
    """The list of all defects."""
    parts = [
        "# Defects",
        (
            "Every way a training loop goes wrong that a tool here can name. *Error*: the training "
            "is not what was meant, and this is shown. *Warning*: it likely is not. *Advice*: it "
            "costs time or memory, or depends on what could not be seen; reported with `--advice` "
            "only."
        ),
        (
            "A code that was given is never given again. `midstep explain CODE` prints a page of "
            "these in the terminal."
        ),
    ]
    for group, title in GROUPS.items():
        rows = [
            f"| [{d.code}]({d.code}.md) | {d.name} | {d.title} | {d.level} | {', '.join(d.tools)} |"
            for d in CATALOGUE
            if d.code[2] == group
        ]
        head = ["| code | name | what the loop does | level | found by |", "|---|---|---|---|---|"]
        parts += [f"## {title}", "\n".join([*head, *rows])]
    return "\n\n".join(parts) + "\n"


def page(defect: Defect) -> str:
    """The page of one defect."""
    tools = ", ".join(TOOLS[tool] for tool in defect.tools)
    stops = f" It stops with `{defect.stops_with}`." if defect.stops_with else ""
    return "\n\n".join(
        [
            f"# {defect.code} {defect.name}",
            f"**{defect.title}** Level: *{defect.level}*. Found by {tools}.",
            f"## Why\n\n{defect.why}",
            f"## What it does to the training\n\n{defect.effect}",
            f"## What to write instead\n\n{defect.fix}",
            (
                f"## Bad\n\n```python\n{defect.bad}```\n\nThe marked line is the one that is "
                f"reported.{stops}"
            ),
            f"## Good\n\n```python\n{defect.good}```",
            f'??? note "What stands above both"\n\n{indented(SETUP)}',
            (
                f"To silence it on one line, with the reason: "
                f"`# midstep: ignore[{defect.code}] why it is right here`."
            ),
            "[All defects](index.md)\n",
        ]
    )


def indented(code: str) -> str:
    """A block of code inside a note."""
    lines = ["```python", *code.rstrip().split("\n"), "```"]
    return "\n".join(f"    {line}" if line else "" for line in lines)
