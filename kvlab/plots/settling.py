"""Layer 4: how a busy card comes to its pace after the contents of the cache change."""

from __future__ import annotations

from matplotlib.figure import Figure
from numpy import ndarray
from pandas import DataFrame

from kvlab.plots.style import INK, QUIET, arm_styles, need, new_figure, styled, time_unit

_DASHES = ("-", "--", ":", "-.")


@styled
def plot_settling(
    replays: DataFrame,
    readings: DataFrame | None = None,
    *,
    timed: tuple[float, float] | None = None,
    power_limit_watts: float | None = None,
    title: str | None = None,
) -> tuple[Figure, ndarray]:
    """Step time, SM clock and board power by seconds since the contents changed; one line per visit.

    Args:
        replays: `visit`, `fill`, `t_s` (seconds since the change), `us`, as of `benchmarks/cap_settling.py`.
        readings: the card's sensors meanwhile: `visit`, `fill`, `t_s`, `sm_mhz`, `watts`.
        timed: seconds from and to which a study times the step; shaded.
        power_limit_watts: of the card; drawn as a line.

    Returns:
        The figure and its axes [1 or 3].

    Raises:
        RunError: when there is nothing to draw.
    """
    need(replays, ("visit", "fill", "t_s", "us"), "replays")
    sensed = ("sm_mhz", "watts") if readings is not None and len(readings) else ()
    if readings is not None and sensed:
        need(readings, ("visit", "fill", "t_s", *sensed), "readings")
    scale, unit = time_unit(replays["us"].median())
    labels = [
        f"one step ({unit})",
        *({"sm_mhz": "SM clock (MHz)", "watts": "board power (W)"}[name] for name in sensed),
    ]
    fig = new_figure(2.6 + 1.3 * len(sensed), title or "A busy card after the contents of its KV cache change")
    axes = fig.subplots(len(labels), 1, squeeze=False, sharex=True, height_ratios=[2, *[1] * len(sensed)])[:, 0]
    styles = arm_styles(replays["fill"])
    if timed is not None:
        for ax in axes:
            ax.axvspan(*timed, color="#E6E6E6", zorder=0)
        axes[0].annotate("timed", (timed[0], 1.0), xycoords=("data", "axes fraction"), color=QUIET, va="bottom")
    turns: dict[str, int] = {}
    for visit, of in replays.groupby("visit"):
        fill = str(of["fill"].iloc[0])
        turn = turns[fill] = turns.get(fill, 0) + 1
        look = {"color": styles[fill][0], "linestyle": _DASHES[(turn - 1) % len(_DASHES)], "linewidth": 0.9}
        axes[0].plot(of["t_s"], of["us"] / scale, label=f"{fill}, visit {turn}", **look)
        for ax, name in zip(axes[1:], sensed, strict=True):
            assert readings is not None
            seen = readings[(readings["visit"] == visit) & readings[name].notna()]
            ax.plot(seen["t_s"], seen[name], drawstyle="steps-post", **look)
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label)
        ax.margins(x=0.01)
    if power_limit_watts is not None and "watts" in sensed:
        axes[-1].axhline(power_limit_watts, color=INK, linewidth=0.8)
        axes[-1].annotate(
            f"limit {power_limit_watts:g} W", (1, power_limit_watts), xycoords=("axes fraction", "data"), ha="right",
            va="bottom", color=QUIET, fontsize=8,
        )  # fmt: skip
    axes[-1].set_xlabel("seconds since the contents changed")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig, axes
