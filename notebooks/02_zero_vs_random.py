# %% [markdown]
# # Zero against random KV, one step
#
# One prepared step serves every arm: between replays only the contents of the KV cache change. Each round times all
# arms in a fresh random order. The verdict is about the gap of `random` against `zeros`, at a margin that is declared
# before anything is measured; a second zeros arm says how much of a gap is noise.

# %% tags=["parameters"]
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "deepseek-v3.2-6l"
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
case = "decode=4*1@1024"  # N requests * Q query tokens @ K tokens of KV
arms = ["random", "random(zero_fraction=0.5)"]
margin = 0.03
mode = "isolated"  # each replay alone; "sustained": back to back, as on a busy server
rounds = 12
smoke = False  # 6 rounds, the fewest that can decide

# %%
from kvlab import lab, plots

lab.setup()
run = lab.measure(
    "02_zero_vs_random",
    "check",
    model,
    engine,
    engine_options=options,
    cases=[case],
    arms=arms,
    margin=margin,
    mode=mode,
    rounds=6 if smoke else rounds,
)
lab.watermark(run)

# %% [markdown]
# ## The verdict
#
# `equivalent`: the 90 % interval of the gap lies within the margin. `different`: wholly outside. `inconclusive`:
# neither, and it says how many rounds would decide. `invalid`: the measurement cannot carry a verdict, as when zeros
# against zeros already spreads wider than half the margin.

# %%
lab.verdict_table(run)

# %%
plots.plot_gaps(run.verdicts)[0]

# %% [markdown]
# ## Every replay
#
# Lines are medians. On a GPU the clock is below, and hollow marks were throttled.

# %%
plots.plot_samples(run.samples, run.cases["case"][0])[0]

# %% [markdown]
# The run stays on disk: the same parameters go on with it, and `kvlab.open_run` opens it.

# %%
run.path
