"""Layer 4: figures: functions of DataFrames that return (fig, ax) or (fig, axes); nothing here shows or saves."""

from kvlab.plots.claim import plot_claim
from kvlab.plots.gaps import plot_compare, plot_gaps
from kvlab.plots.kernels import plot_kernels, plot_parts
from kvlab.plots.panels import plot_context_panels, plot_topk_panels, plot_zero_panels
from kvlab.plots.samples import plot_clocks, plot_samples
from kvlab.plots.selection import plot_selection
from kvlab.plots.settling import plot_settling
from kvlab.plots.style import SERIES_COLOURS, VERDICT_STYLE
from kvlab.plots.sweeps import plot_context_sweep, plot_topk_sweep, plot_zero_fraction
from kvlab.plots.views import plot_views

__all__ = [
    "SERIES_COLOURS",
    "VERDICT_STYLE",
    "plot_claim",
    "plot_clocks",
    "plot_compare",
    "plot_context_panels",
    "plot_context_sweep",
    "plot_gaps",
    "plot_kernels",
    "plot_parts",
    "plot_samples",
    "plot_selection",
    "plot_settling",
    "plot_topk_panels",
    "plot_topk_sweep",
    "plot_views",
    "plot_zero_fraction",
    "plot_zero_panels",
]
