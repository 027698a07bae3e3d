"""Layer 6: a report as one HTML file: no script, nothing fetched, made to be printed as well."""

from __future__ import annotations

import base64
import io
import re

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from kvlab.plots.style import VERDICT_STYLE
from kvlab.report.content import ABOUT_PARTS, Report

# An SVG of more marks, or larger than this, is larger than its picture at a printer's resolution.
_SVG_MARKS, _SVG_BYTES = 800, 120_000
_DPI = 150
MARKS = {"equivalent": "●", "different": "◆", "inconclusive": "■", "invalid": "✕", "unfinished": "○"}
# Darker than the figures' colours, for text on white; the mark's shape says the same.
INKS = {
    "equivalent": "#00664A",
    "different": "#A34700",
    "inconclusive": "#7A5200",
    "invalid": "#555555",
    "unfinished": "#1F6A94",
}

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #222;
  background: #fff; margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 76rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; overflow-wrap: anywhere; }
p, ul { max-width: 48rem; }
.quiet { color: #555; font-size: .875em; }
.answer { font-size: 1.25rem; font-weight: 600; line-height: 1.35; margin: .4rem 0 .8rem; }
.counts { display: flex; flex-wrap: wrap; gap: .5rem 1.4rem; list-style: none; padding: 0; margin: .6rem 0 1rem; }
.counts b { font-size: 1.35em; font-weight: 600; margin: 0 .15rem; }
.wide { overflow-x: auto; }
.wide + .wide { margin-top: 1rem; }
table { border-collapse: collapse; font-size: .8rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #e2e2e2; }
th { font-weight: 600; border-bottom: 1px solid #999; white-space: nowrap; }
td { white-space: nowrap; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 16rem; }
td code { overflow-wrap: break-word; }
code, pre { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .95em; }
pre { background: #f4f4f4; padding: .7rem .9rem; font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.mark { display: inline-block; width: 1.15em; }
figure { margin: 1.2rem 0 1.8rem; }
figure svg, figure img { display: block; width: 100%; height: auto; }
figcaption { color: #555; font-size: .875em; margin-top: .3rem; overflow-wrap: anywhere; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.facts td:first-child { color: #555; white-space: nowrap; overflow-wrap: normal; }
@page { size: landscape; margin: 12mm; }
@media print {
  body { font-size: 10pt; padding: 0; max-width: none; }
  .wide { overflow: visible; }
  table { font-size: 7.5pt; }
  td.text { min-width: 10rem; }
  figure, tr, pre { break-inside: avoid; }
  figure svg, figure img { max-height: 160mm; object-fit: contain; object-position: left; }
  h2, h3 { break-after: avoid; }
  thead { display: table-header-group; }
}
"""

_TEMPLATE = """\
{% macro table(t, class="") %}
<div class="wide"><table{% if class %} class="{{ class }}"{% endif %}>
<thead><tr>{% for name in t.head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in t.rows %}{% set verdict = t.marks[loop.index0] if t.marks else "" %}
<tr>{% for cell in row %}<td{% if cell | length > 36 %} class="text"{% endif %}>
{%- if loop.first and verdict %}{{ mark(verdict) }}{% endif -%}
{%- if t.head[loop.index0] == "case" and t.marks %}<code>{{ cell }}</code>{% else %}{{ cell }}{% endif %}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="kvlab {{ version }}">
<title>{{ r.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ r.title }}</h1>
<p class="quiet">kvlab {{ version }}, written {{ r.written }}</p>
</header>
<main>
<h2>The question</h2>
<p>{{ r.question }}</p>
<h2>The answer</h2>
<p class="answer">{{ r.headline }}</p>
<ul class="counts">
{% for verdict, n in r.counts.items() %}<li>{{ mark(verdict) }}<b>{{ n }}</b> {{ verdict }}</li>
{% endfor %}</ul>
{% if r.sentences %}<ul>
{% for sentence in r.sentences %}<li>{{ sentence }}</li>
{% endfor %}</ul>{% endif %}
{% for sentence in r.missing %}<p><b>Not in this report:</b> {{ sentence }}</p>
{% endfor %}
{% if r.runs %}<h2>Runs</h2>
{{ table(r.runs) }}{% endif %}
<h2>Verdicts</h2>
{% if r.verdicts %}{{ table(r.verdicts) }}
<p class="quiet">{{ r.how_to_read }}</p>{% else %}<p>The run holds no case yet.</p>{% endif %}
{% if r.drawings or r.undrawn %}<h2>Figures</h2>
{% for d in r.drawings %}<figure>{{ picture(d) }}<figcaption>{{ d.caption }}</figcaption></figure>
{% endfor %}
{% for sentence in r.undrawn %}<p class="quiet">Not drawn: {{ sentence }}</p>
{% endfor %}{% endif %}
{% if r.arms %}<h2>Other contents</h2>
{{ table(r.arms) }}{% endif %}
{% if r.causes or r.parts or r.clocks or r.remarks %}<h2>Causes</h2>
{% if r.causes %}<ul>{% for who, cause in r.causes %}<li><b>{{ who }}</b>: {{ cause }}</li>
{% endfor %}</ul>{% endif %}
{% if r.parts %}{% for t in r.parts %}{{ table(t) }}{% endfor %}
<p class="quiet">{{ about_parts }}</p>{% endif %}
{% if r.clocks %}{{ table(r.clocks) }}
<p class="quiet">The gap in cycles is that of time x SM clock: what is left of the gap once the clock is taken out,
as far as the clock was read while the replays ran.</p>{% endif %}
{% if r.remarks %}<ul>{% for who, remark in r.remarks %}<li>{{ remark }} <span class="quiet">({{ who }})</span></li>
{% endfor %}</ul>{% endif %}{% endif %}
{% if r.unsettled %}<h2>Not decided, and why</h2>
<ul>{% for who, verdict, reasons in r.unsettled %}<li>{{ mark(verdict) }}<b>{{ who }}</b>, {{ verdict }}
{%- if reasons %}: {{ reasons | join(" ") }}{% endif %}</li>
{% endfor %}</ul>{% endif %}
<h2>Where the numbers come from</h2>
{% for o in r.origins %}<h3>{{ o.label }}</h3>
<div class="wide"><table class="facts"><tbody>
{% for name, value in o.facts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div>
{% if o.notes %}<p>Fallbacks:</p><ul>{% for note in o.notes %}<li>{{ note }}</li>{% endfor %}</ul>{% endif %}
{% if o.command %}<p>To repeat it:</p>
<pre>{{ o.command }}</pre>{% else %}<p>The run does not say which command made it.</p>{% endif %}
{% endfor %}
</main>
</body>
</html>
"""


def to_html(report: Report, version: str) -> str:
    """The report as the text of one HTML file; every text in it is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    helpers = {
        "about_parts": ABOUT_PARTS,
        "mark": _mark,
        "picture": lambda drawing: _picture(drawing.figure, drawing.caption),
    }
    template = environment.from_string(_TEMPLATE, globals=helpers)
    return template.render(r=report, version=version, style=Markup(_STYLE))


def svg_text(figure: Figure) -> str:
    """A figure as an `<svg>` element without what only an editor needs; the same figure gives the same text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvlab", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Comments repeat each text; groups' names (figure_1, ...) come again in every figure of the page.
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub(r"\n\s*", "\n", text)


def png_bytes(figure: Figure, dpi: int = _DPI) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def _picture(figure: Figure, caption: str) -> Markup:
    width = Markup('style="max-width:{:.2f}in"').format(figure.get_figwidth() * 1.15)
    marks = sum(np.asarray(drawn.get_offsets()).shape[0] for ax in figure.axes for drawn in ax.collections)
    text = svg_text(figure) if marks <= _SVG_MARKS else ""
    if 0 < len(text) <= _SVG_BYTES:
        return Markup('<svg role="img" aria-label="{}" {}').format(caption, width) + Markup(text.removeprefix("<svg"))
    data = base64.b64encode(png_bytes(figure)).decode()
    return Markup('<img alt="{}" {} src="data:image/png;base64,{}">').format(caption, width, data)


def _mark(verdict: str) -> Markup:
    known = verdict if verdict in VERDICT_STYLE else "unfinished"
    look = 'class="mark" aria-hidden="true" style="color:{}"'
    return Markup(f"<span {look}>{{}}</span>").format(INKS[known], escape(MARKS[known]))
