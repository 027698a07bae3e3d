"""Layer 6: the tables that notebooks and the README show: texts for people, from the numbers of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from kvlab.evidence import cause_clause, claim_gaps, gap_rows, step_key
from kvlab.kernel_gaps import kernel_gap_table
from kvlab.pace import OFF_PACE_MARK, OTHER_PACE_WORDS, drawn
from kvlab.plots.claim import verdict_words
from kvlab.plots.style import DASH, MINUS, MODES, percent, shorten, tokens
from kvlab.report.content import estimate_text
from kvlab.run import Run

_CELL = "text-align: left; vertical-align: top; white-space: nowrap; padding: 1px 11px 1px 0; line-height: 1.4"
_CAPTION = "caption-side: bottom; text-align: left; line-height: 1.4; padding-top: 6px; color: inherit; max-width: 60em"
TABLE: Any = [{"selector": "th, td", "props": _CELL}, {"selector": "caption", "props": _CAPTION}]
# Backgrounds that stay apart in grey; nothing for equivalent, which is what one hopes for.
_SHADES = {"different": "#F6CDB5", "inconclusive": "#FBE7BE", "invalid": "#DDDDDD"}
DECIDED = ("equivalent", "different")


def claim_table(rows: pd.DataFrame, causes: Mapping[Any, Mapping[str, Any]] | None = None) -> pd.DataFrame:
    """One row per model, phase and context: the gap in each mode with its interval, in percent, and the verdict.

    Args:
        rows: of `claim_gaps`.
        causes: of `find_causes`; with them a column `why`, of the mode with the larger gap.

    Returns:
        Texts: model, step, a column for each of `kvlab.plots.style.MODES` (with `OFF_PACE_MARK` behind the gaps that
        `gap_rows` says it of), verdict (isolated / sustained where they differ), why.
    """
    told = []
    for _, of in rows.groupby(["model", "engine", "routing", "phase", "context"], sort=False):
        first = of.iloc[0]
        cells = {row["mode"]: DASH if pd.isna(row["gap"]) else _gap_text(row) for _, row in of.iterrows()}
        line = {
            "model": model_words(first),
            "step": place_words(first),
            **{f"{mode}, %": cells.get(mode, DASH) for mode in MODES},
            "verdict": verdict_words(drawn(of)),
        }
        if causes is not None:
            # Of a gap that was decided, where one was.
            largest = max(of.to_dict("records"), key=lambda row: (row["verdict"] in DECIDED, abs(row["gap"] or 0.0)))
            cause = causes.get(step_key(largest))
            kinds = {found["kind"] for row in of.to_dict("records") if (found := causes.get(step_key(row)))}
            one_of_two = len(of) > 1 and (of["verdict"].nunique() > 1 or len(kinds) > 1)
            line["why"] = (f"{largest['mode']}: " if one_of_two and cause else "") + cause_clause(cause)
        told.append(line)
    return pd.DataFrame(told)


def _gap_text(row: Mapping[Any, Any] | pd.Series) -> str:
    return estimate_text(row["gap"], (row["ci90_lo"], row["ci90_hi"])) + OFF_PACE_MARK * bool(row["off_pace"])


def context_table(rows: pd.DataFrame) -> Styler:
    """Gaps in percent with their 90 % intervals, a column a context; shaded where not equivalent."""
    contexts = sorted(set(rows["context"]))
    rows = rows.sort_values(["model", "engine", "routing", "phase", "mode"], kind="stable")
    told, shades = [], []
    for _, of in rows.groupby(["model", "engine", "routing", "phase", "mode"], sort=False):
        first, at = of.iloc[0], of.drop_duplicates("context").set_index("context")
        cells = [_gap_text(at.loc[c]) if c in at.index else "" for c in contexts]
        told.append([model_words(first), first["phase"], first["mode"], *cells])
        shades.append(["", "", "", *(_shade(at.loc[c, "verdict"]) if c in at.index else "" for c in contexts)])
    head = ["model", "phase", "mode", *(f"{tokens(c)} tokens" for c in contexts)]
    style = _styled(pd.DataFrame(told, columns=head))
    style = style.apply(lambda table: pd.DataFrame(shades, columns=table.columns), axis=None)
    legend = ", ".join(f'<span style="{_shade(verdict)}">{verdict}</span>' for verdict in _SHADES)
    note = f";{OFF_PACE_MARK}: {OTHER_PACE_WORDS}" if rows["off_pace"].any() else ""
    return style.set_caption(f"gap in percent (90 % interval); shaded: {legend}{note}")


def _shade(verdict: str) -> str:
    return f"background-color: {_SHADES[verdict]}; color: #222222" if verdict in _SHADES else ""


def model_words(row: Mapping[Any, Any] | pd.Series) -> str:
    """`gpt-oss-20b (real routing)`."""
    return str(row["model"]) + (" (real routing)" if row["routing"] == "real" else "")


def cause_table(runs: Sequence[Run]) -> Styler:
    """One row per step and mode whose kernels were profiled: gap, verdict, and the cause in a sentence."""
    rows = gap_rows(runs)
    rows = rows[rows["arm"] == "random"]
    texts = []
    by_path = {str(run.path): run for run in runs}
    for row in claim_gaps(rows).to_dict("records"):
        cause = (by_path[row["path"]].verdict_of(row["case"], row["mode"]) or {}).get("cause")
        if cause:
            gap = _gap_text(row)
            told = [
                model_words(row),
                place_words(row),
                row["mode"],
                gap,
                row["verdict"],
                cause["sentence"],
            ]
            texts.append(told)
    head = ["model", "step", "mode", "gap, % (90 % interval)", "verdict", "why"]
    return _styled(pd.DataFrame(texts, columns=head), wide="why")


def kernel_table(kernels: pd.DataFrame, most: int = 8) -> Styler:
    """The kernels of one case in one mode that differ most between zeros and random, the rest summed; µs of a step."""
    table = kernel_gap_table(kernels)
    total, table = table.iloc[-1], table.iloc[:-1]
    head, others = table.iloc[:most], table.iloc[most:]
    rows = [_kernel_row(shorten(row["kernel"], 56), row["role"], row) for _, row in head.iterrows()]
    if len(others):
        rows.append(
            _kernel_row(f"{len(others)} others", "", others[["baseline_us", "arm_us", "gap_us", "of_step"]].sum())
        )
    rows.append(_kernel_row("all", "", total))
    return _styled(pd.DataFrame(rows))


def _kernel_row(kernel: str, role: str, row: pd.Series) -> dict[str, str]:
    low, high = (row.get(name, math.nan) for name in ("lo_us", "hi_us"))
    return {
        "kernel": kernel,
        "role": role,
        "zeros, µs": _us(row["baseline_us"]),
        "random, µs": _us(row["arm_us"]),
        "gap, µs": _us(row["gap_us"], "+"),
        "90 % interval": "" if math.isnan(low + high) else f"{_us(low, '+')} .. {_us(high, '+')}",
        "of the step": percent(row["of_step"]),
    }


def _us(value: float, sign: str = "") -> str:
    """Whole microseconds from 100 on, else with one digit after the point."""
    return f"{value:{sign},.{0 if abs(value) >= 100 else 1}f}".replace("-", MINUS)


def selection_table(cases: Iterable[tuple[Run, str, str]], rows: Iterable[Mapping[str, Any]] = ()) -> Styler | None:
    """What sparse attention picked, under zeros and then under random KV; None where no model picks.

    Args:
        cases: whose verdict tells of a layer.
        rows: of `records(source, "selection")`, which tell of every layer: means, and the range where layers differ.
    """
    found = [(row["model"], row["case"], row["arms"]) for row in rows]
    for run, case, mode in cases:
        verdict = run.verdict_of(case, mode) or {}
        text = str(verdict.get("text") or case)
        if all((model, of) != (run.study["model"], text) for model, of, _ in found):
            found.append((run.study["model"], text, {a: {"": s} for a, s in (verdict.get("selection") or {}).items()}))
    told = []
    for model, text, arms in sorted(found, key=lambda row: row[0]):
        layers = [list(arms.get(arm, {}).values()) for arm in ("zeros", "random")]
        if all(layers):
            changes = [" → ".join(_picked(of, name) for of in layers) for name in ("neighbours", "pages", "spread")]
            told.append([model, text, f"{len(layers[0])}", f"{layers[0][0]['picks']:,.0f}", *changes])
    head = ["model", "case", "layers", "picks", "neighbours", "pages", "spread"]
    return _styled(pd.DataFrame(told, columns=head)) if told else None


def _picked(layers: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [float(of[name]) for of in layers]
    mean = float(np.nanmean(values))
    if name != "neighbours":
        return f"{mean:,.0f}" if mean >= 20 else f"{mean:.1f}"
    many = f" ({100 * min(values):.0f} to {100 * max(values):.0f})" if max(values) - min(values) >= 0.01 else ""
    return f"{100 * mean:.0f} %{many}"


def routing_table(runs: Sequence[Run], rows: Iterable[Mapping[str, Any]] = ()) -> Styler:
    """How tokens were sent to experts in each run, how many went elsewhere under random KV, and the gaps beside it.

    Args:
        rows: of `records(source, "loads")`, which also tell how full the busiest expert was.
    """
    told: list[dict[str, str]] = []
    for (model, routing), of in gap_rows(runs).query("arm == 'random'").groupby(["model", "routing"], sort=False):
        verdicts = [(run, row) for run in runs for row in run.verdicts.to_dict("records")]
        moved = [_moved(run, row) for run, row in verdicts if (row["model"], row["routing"]) == (model, routing)]
        known = [share for share in moved if share is not None]
        told.append(
            {
                "model": str(model),
                "routing": str(routing),
                "case": f"{len(of)} gaps",
                "to other experts": f"{100 * max(known):.0f} %" if known else DASH,
                "busiest expert, x mean": "",
                "gap": f"{percent(of['gap'].min(), 1)} to {percent(of['gap'].max(), 1)}",
            }
        )
    for row in rows:
        most = [row["most_over_mean"].get(arm) for arm in ("zeros", "random")]
        told.append(
            {
                "model": row["model"],
                "routing": row["routing"],
                "case": row["case"],
                "to other experts": f"{100 * row['moved']:.0f} %",
                "busiest expert, x mean": " to ".join(f"{value:.1f}" for value in most if value is not None),
                "gap": "",
            }
        )
    return _styled(pd.DataFrame(told))


def _moved(run: Run, row: Mapping[Any, Any]) -> float | None:
    moved = (run.verdict_of(row["case"], row["mode"]) or {}).get("routing_moved") or {}
    return moved.get("random")


def step_words(row: Mapping[Any, Any] | pd.Series) -> str:
    """`decode of 8`, `hit of 2,048`: requests, and query tokens of each where it is more than one."""
    batch, query = int(row["batch"]), int(row["query"])
    size = f"{batch}" if query == 1 else f"{query:,}" if batch == 1 else f"{batch} x {query:,}"
    return f"{row['phase']} of {size}"


def place_words(row: Mapping[Any, Any] | pd.Series) -> str:
    """`decode of 8 at 100k`: the step and its context."""
    return f"{step_words(row)} at {tokens(row['context'])}"


def with_places(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `step` (`place_words`) and `place` (the model too), for `kvlab.plots.plot_claim`."""
    steps = [place_words(row) for row in rows.to_dict("records")]
    return rows.assign(step=steps, place=[f"{model}: {step}" for model, step in zip(rows["model"], steps, strict=True)])


def _styled(table: pd.DataFrame, wide: str | None = None) -> Styler:
    style = table.style.hide().format(escape="html").set_table_styles(TABLE)
    return (
        style.set_properties(subset=[wide], **{"white-space": "normal !important", "min-width": "28em"})
        if wide
        else style
    )
