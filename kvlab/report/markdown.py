"""Layer 6: a run in a block of Markdown, to paste into a pull request."""

from __future__ import annotations

import re
from pathlib import Path

from kvlab.report.answer import counted, counts_text, headline, sentences
from kvlab.report.content import verdict_table
from kvlab.report.facts import RunFacts, read_runs
from kvlab.report.origin import origin_of
from kvlab.run import Run


def markdown_summary(run: Run | RunFacts | Path | str) -> str:
    """The answer, the verdicts as a table, the provenance in a line, and the command that repeats the run.

    Raises:
        RunError: when the run cannot be read.
    """
    facts = run if isinstance(run, RunFacts) else read_runs([run])[0][0]
    origin = origin_of(facts)
    parts = [f"**Does it matter what is in the KV cache?** {_text(headline(facts.rows))}"]
    if facts.rows:
        counts = f"{counts_text(counted(facts.rows))}." if len(facts.rows) > 1 else ""
        said = [sentence for sentence in (counts, *sentences(facts.rows)) if sentence]
        parts.append("\n".join(f"- {_text(sentence)}" for sentence in said))
        table = verdict_table(facts.rows)
        code = [name == "case" for name in table.head]
        lines = [[_text(name) for name in table.head], ["---"] * len(table.head)]
        lines += [
            [_code(c) if is_code else _text(c) for c, is_code in zip(row, code, strict=True)] for row in table.rows
        ]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    parts.append(_text(origin.line))
    parts += [f"Fallback: {_text(note)}" for note in origin.notes]
    if origin.command:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", origin.command)), default=0))
        parts.append(f"{fence}\n{origin.command}\n{fence}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    """Text that stays text: nothing in it is markup, a mention or a cell's end."""
    plain = " ".join(text.split()).replace("\N{MINUS SIGN}", "-")
    return re.sub(r"([\\`*_\[\]<>|#~@$])", r"\\\1", plain)


def _code(text: str) -> str:
    """Code in a table's cell."""
    plain = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    pad = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{pad}{plain}{pad}{fence}"
