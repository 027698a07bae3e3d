# %% [markdown]
# # The dashboard
#
# Choose a model and its contexts, press **Start**, watch the gap narrow, keep the figure. The measurement runs in a
# process of its own: this kernel stays free, and an interrupt here does not touch it. Every finished round is on disk,
# so after **Cancel** the same settings go on where they stopped.
#
# Without a GPU, measure on the embedded engine (`reference`), or open one of the H200 runs under *Earlier run*. The
# fields begin with a sweep of some seconds; a long context or a `hit` takes a CPU minutes.

# %%
from kvlab import lab

lab.setup()
lab.watermark()

# %%
from kvlab.widgets import Lab

board = Lab()
board

# %% [markdown]
# The run that is shown is `board.run`: its tables are DataFrames (`board.run.verdicts`, `board.run.samples`,
# `board.run.gaps`). `board.close()` ends a measurement and takes the dashboard away.
