"""Layer 6: reports of runs: one file to read, print or send on, and a block for a pull request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvlab import __version__
from kvlab.errors import RunError
from kvlab.report.content import make_report
from kvlab.report.facts import read_runs
from kvlab.report.markdown import markdown_summary
from kvlab.run import Run

__all__ = ["markdown_summary", "write_report"]


def write_report(
    runs: Sequence[Path | str | Run],
    out: str | Path,
    *,
    title: str | None = None,
    missing: Callable[[str], None] | None = None,
) -> Path:
    """Write what some runs show as one self-contained file: the answer first, then verdicts, figures, provenance.

    An unfinished run is reported as far as it is; one that cannot be read is named in the report.

    Args:
        runs: runs, or their folders.
        out: the file; HTML unless its name ends in `.pdf`. Folders above it are made.
        title: of the report; from models and cards when absent.
        missing: called, once the file is written, with a sentence for each run that could not be read.

    Returns:
        The file that was written.

    Raises:
        RunError: when none of the runs can be read, or the file cannot be written.
    """
    place = Path(out)
    if place.suffix.lower() not in (".html", ".htm", ".pdf"):
        raise RunError(f"{place}: a report is HTML or PDF; name it report.html or report.pdf")
    facts, unread = read_runs(runs)
    report = make_report(facts, unread, title)
    if place.suffix.lower() == ".pdf":
        from kvlab.report.pdf import to_pdf  # late: reportlab is an extra

        data = to_pdf(report, __version__)
    else:
        from kvlab.report.html import to_html

        data = to_html(report, __version__).encode()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    except OSError as error:
        raise RunError(f"{place}: {error.strerror or error} while writing the report; choose another --out") from error
    if missing:
        for sentence in unread:
            missing(sentence)
    return place
