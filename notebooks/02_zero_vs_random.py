# %% [markdown]
# # Zero against random KV, one step
#
# One prepared step serves every arm; only the contents of the KV cache change between replays. Each round times all
# arms in a fresh random order. The verdict is about the gap of `random` against `zeros`, with a margin that is declared
# before anything is measured, and the second zeros arm says how much of a gap is noise.

# %% tags=["parameters"]
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "deepseek-v3.2-6l"
case = "decode=4*1@2048"  # N requests * Q query tokens @ K tokens of KV
arms = ["random", "random(zero_fraction=0.5)"]
margin = 0.03
mode = "isolated"  # each replay alone; "sustained": back to back, as on a busy server
rounds = 20
smoke = False  # 6 rounds, the fewest that can decide

# %%
from contextlib import closing

import kvlab
from kvlab import lab, plots

lab.setup()
with closing(kvlab.load_engine(model, engine)) as loaded:
    run = kvlab.check(
        loaded, [case], arms=arms, margin=margin, mode=mode, rounds=6 if smoke else rounds, progress=lab.progress()
    )
lab.watermark(run)

# %% [markdown]
# ## The verdict
#
# `equivalent`: the 90 % interval lies within the margin. `different`: wholly outside. `inconclusive`: neither, and the
# reason says how many rounds would decide. `invalid`: zeros against zeros is not equivalent within half the margin, so
# the gap proves nothing.

# %%
lab.verdicts(run)

# %%
plots.plot_gaps(run.verdicts)[0]

# %% [markdown]
# ## Every replay
#
# Where a card was read: its clock below. Hollow marks were throttled.

# %%
plots.plot_samples(run.samples, run.cases["case"][0])[0]

# %% [markdown]
# The run stays on disk; `kvlab.open_run` opens it again.

# %%
run.path
