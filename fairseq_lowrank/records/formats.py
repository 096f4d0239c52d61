"""Tables as Markdown and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence

FORMATS = ("markdown", "latex")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")
# Characters with a meaning in LaTeX, and characters of our tables that pdflatex does not know.
LATEX = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{
        "±": r"$\pm$",
        "−": "$-$",
        "×": r"$\times$",
        "·": r"$\cdot$",
        "…": r"\ldots{}",
        "–": "--",
        "<": "$<$",
        ">": "$>$",
    },
}


def escape(text: str) -> str:
    """Return text that stays text in a Markdown table: no HTML, link, image, formatting or control character."""
    text = CONTROL.sub(" ", text)
    text = re.sub(r"[\\`*\[\]|~$]", r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    # Markdown turns addresses into links
    return re.sub(r"(?i)\bwww\.", "www&#46;", text.replace("://", "&#58;//"))


def escape_latex(text: str) -> str:
    """Return text that stays text in LaTeX; a minus before a number is a minus there too."""
    text = re.sub(r"(?<![\w.])-(?=\d)", "−", CONTROL.sub(" ", text))
    return "".join(LATEX.get(character, character) for character in text)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [[escape(cell) for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table in LaTeX with rules of the package booktabs. The first column is aligned to the left."""
    first, *others = (" & ".join(escape_latex(cell) for cell in line) + r" \\" for line in (header, *rows))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape_latex(caption)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            first,
            r"\midrule",
            *others,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )
