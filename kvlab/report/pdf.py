"""Layer 6: a report as PDF: the same content, set by ReportLab, which does pages, tables and nothing else.

ReportLab is pure Python under a BSD license and needs only Pillow, which Matplotlib brings. A browser's PDF would need
the browser, WeasyPrint the Pango libraries; Matplotlib's own PdfPages has no tables that break over pages.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from xml.sax.saxutils import escape

import matplotlib

from kvlab.errors import RunError
from kvlab.report.content import ABOUT_PARTS, Report, Table
from kvlab.report.html import INKS, MARKS, png_bytes

_DPI = 190
_MARGIN = 40.0  # points
_FACES = {"KvlabSans": "DejaVuSans.ttf", "KvlabBold": "DejaVuSans-Bold.ttf", "KvlabMono": "DejaVuSansMono.ttf"}


def to_pdf(report: Report, version: str) -> bytes:
    """The report as a PDF on landscape A4.

    Raises:
        RunError: where ReportLab is not installed.
    """
    try:
        from reportlab.lib.pagesizes import A4, landscape
        from reportlab.platypus import SimpleDocTemplate
    except ImportError:
        raise RunError(
            "writing a PDF needs ReportLab; pip install 'kvlab[pdf]', or write .html and print that"
        ) from None
    buffer = io.BytesIO()
    sides = {f"{side}Margin": _MARGIN for side in ("left", "right", "top", "bottom")}
    document: Any = SimpleDocTemplate(
        buffer, pagesize=landscape(A4), title=report.title, creator=f"kvlab {version}", **sides
    )
    story = _story(report, version, document.width, document.height)
    document.build(story, onFirstPage=_numbered, onLaterPages=_numbered)
    return buffer.getvalue()


def _story(report: Report, version: str, width: float, height: float) -> list[Any]:
    from reportlab.platypus import Paragraph, Spacer

    styles = _styles()

    def text(words: str, style: str = "body") -> Any:
        return Paragraph(escape(words), styles[style])

    def bullets(items: Sequence[str]) -> list[Any]:
        return [Paragraph(escape(item), styles["bullet"], bulletText="•") for item in items]

    story = [text(report.title, "title"), text(f"kvlab {version}, written {report.written}", "quiet")]
    story += [text("The question", "h2"), text(report.question)]
    story += [text("The answer", "h2"), text(report.headline, "answer")]
    counts = "   ".join(f"{_mark(verdict)} <b>{n}</b> {escape(verdict)}" for verdict, n in report.counts.items())
    story += [Paragraph(counts, styles["body"]), *bullets(report.sentences)]
    story += [text(f"Not in this report: {sentence}") for sentence in report.missing]
    if report.runs:
        story += [text("Runs", "h2"), _table(report.runs, width)]
    story += [text("Verdicts", "h2")]
    if report.verdicts:
        story += [_table(report.verdicts, width), Spacer(1, 4), text(report.how_to_read, "quiet")]
    else:
        story += [text("The run holds no case yet.")]
    for drawing in report.drawings:
        story += [_image(png_bytes(drawing.figure, _DPI), drawing.figure, drawing.caption, width, height, styles)]
    story += [text(f"Not drawn: {sentence}", "quiet") for sentence in report.undrawn]
    if report.arms:
        story += [text("Other contents", "h2"), _table(report.arms, width)]
    if report.causes or report.parts or report.clocks or report.remarks:
        story += [text("Causes", "h2"), *bullets([f"{who}: {cause}" for who, cause in report.causes])]
        for table in report.parts:
            story += [_table(table, width), Spacer(1, 6)]
        story += [text(ABOUT_PARTS, "quiet")] if report.parts else []
        story += [_table(report.clocks, width)] if report.clocks else []
        story += bullets([f"{remark} ({who})" for who, remark in report.remarks])
    if report.unsettled:
        story += [text("Not decided, and why", "h2")]
        story += bullets([f"{who}, {verdict}: {' '.join(reasons)}" for who, verdict, reasons in report.unsettled])
    story += [text("Where the numbers come from", "h2")]
    for origin in report.origins:
        story += [text(origin.label, "h3"), _table(Table(("", ""), origin.facts), width, (0.14, 0.86))]
        story += bullets([f"Fallback: {note}" for note in origin.notes])
        story += [text("To repeat it:" if origin.command else "The run does not say which command made it.")]
        story += [text(origin.command, "code")] if origin.command else []
    return story


def _table(table: Table, width: float, shares: Sequence[float] | None = None) -> Any:
    """A table as wide as the page; columns by their longest cells, which wrap where that is too much."""
    from reportlab.lib.colors import HexColor
    from reportlab.platypus import LongTable, Paragraph, TableStyle

    styles = _styles()
    if shares is None:
        longest = [max(len(row[i]) for row in (table.head, *table.rows)) for i in range(len(table.head))]
        weights = [min(max(n, 5), 48) + 2 for n in longest]
        shares = [weight / max(sum(weights), 150) for weight in weights]
    cells: list[list[Any]] = []
    for number, row in enumerate(table.rows):
        cells.append([Paragraph(_breakable(cell), styles["cell"]) for cell in row])
        if table.marks:
            verdict = table.marks[number]
            cells[-1][0] = Paragraph(f"{_mark(verdict)} {escape(row[0])}", styles["cell"])
    head = [[Paragraph(f"<b>{escape(name)}</b>", styles["cell"]) for name in table.head]] if any(table.head) else []
    rules = [
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
        ("LINEBELOW", (0, 0), (-1, -1), 0.4, HexColor("#DDDDDD")),
        ("LEFTPADDING", (0, 0), (-1, -1), 0),
        ("RIGHTPADDING", (0, 0), (-1, -1), 6),
        ("TOPPADDING", (0, 0), (-1, -1), 1.5),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 2.5),
    ]
    widths = [share * width for share in shares]
    return LongTable([*head, *cells], widths, repeatRows=len(head), hAlign="LEFT", style=TableStyle(rules))


def _image(png: bytes, figure: Any, caption: str, width: float, height: float, styles: Any) -> Any:
    from reportlab.platypus import Image, KeepTogether, Paragraph, Spacer

    wide, high = (72 * inches for inches in figure.get_size_inches())
    scale = min(1.0, width / wide, (height - 64) / high)
    image = Image(io.BytesIO(png), wide * scale, high * scale, hAlign="LEFT")
    return KeepTogether([Spacer(1, 10), image, Paragraph(escape(caption), styles["quiet"])])


def _breakable(text: str) -> str:
    """Text that may also be broken within a long word, a path or a command, say."""
    parts = (word[i : i + 40] for word in text.split(" ") for i in range(0, max(len(word), 1), 40))
    return escape(" ".join(parts)) if any(len(word) > 60 for word in text.split(" ")) else escape(text)


def _mark(verdict: str) -> str:
    known = verdict if verdict in MARKS else "unfinished"
    return f'<font color="{INKS[known]}">{MARKS[known]}</font>'


def _numbered(canvas: Any, document: Any) -> None:
    canvas.setFont("KvlabSans", 7)
    canvas.drawRightString(document.pagesize[0] - _MARGIN, 22, f"{document.page}")


@lru_cache(maxsize=1)
def _styles() -> Any:
    """Styles by name; Matplotlib's DejaVu, as the PDF standard's own fonts lack µ's neighbours and arrows."""
    from reportlab.lib.colors import HexColor
    from reportlab.lib.styles import ParagraphStyle
    from reportlab.pdfbase.pdfmetrics import registerFont, registerFontFamily
    from reportlab.pdfbase.ttfonts import TTFont

    for name, file in _FACES.items():
        registerFont(TTFont(name, f"{matplotlib.get_data_path()}/fonts/ttf/{file}"))
    registerFontFamily("KvlabSans", normal="KvlabSans", bold="KvlabBold", italic="KvlabSans", boldItalic="KvlabBold")

    def style(size: float, *, bold: bool = False, **more: Any) -> Any:
        font = {"fontName": "KvlabBold" if bold else "KvlabSans", "fontSize": size, "leading": 1.35 * size}
        return ParagraphStyle("", **{**font, "textColor": HexColor("#222222"), "splitLongWords": 1, **more})

    grey = HexColor("#555555")
    return {
        "title": style(15, bold=True, spaceAfter=3),
        "h2": style(11.5, bold=True, spaceBefore=14, spaceAfter=4, keepWithNext=1),
        "h3": style(9.5, bold=True, spaceBefore=8, spaceAfter=3, keepWithNext=1),
        "answer": style(12, bold=True, spaceAfter=5),
        "body": style(9, spaceAfter=4),
        "bullet": style(9, leftIndent=12, bulletIndent=2, spaceAfter=2),
        "quiet": style(8, textColor=grey, spaceAfter=3),
        "cell": style(7.2),
        "code": style(7.5, fontName="KvlabMono", backColor=HexColor("#F4F4F4"), borderPadding=4, spaceBefore=4),
    }
