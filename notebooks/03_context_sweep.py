# %% [markdown]
# # The gap against context length
#
# Does the claim hold at 1K tokens of context and at 100K, for a decode and for a prefill after a prefix-cache hit?
# The shaded band is the margin, the bars are 90 % intervals.

# %% tags=["parameters"]
source = "committed"  # runs of an H200 in this repository; "live": sweep here, with what follows
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "llama-3.1-8b"
contexts = [256, 1024, 2048]  # tokens of KV; an H200 takes [1024, 8192, 32768, 100000] in a few minutes
phases = ["decode", "hit"]  # also verify, prefill, chunk
batch = [4]
margin = 0.03
mode = "isolated"  # or "sustained"
rounds = 12
smoke = False  # two contexts, 6 rounds

# %%
from IPython.display import display

import kvlab
from kvlab import lab, plots

lab.setup()
if source == "committed":
    runs = lab.committed(f"sweep-*-{mode}", f"vllm-*-{mode}")
else:
    how = {
        "contexts": contexts[:2] if smoke else contexts,
        "rounds": 6 if smoke else rounds,
        "phases": phases,
        "batch": batch,
        "margin": margin,
        "mode": mode,
    }
    runs = [lab.sweep("03_context_sweep", model, engine, **how)]
lab.watermark(*runs)

# %%
for run in runs:
    display(plots.plot_context_sweep(run.gaps, title=run.study["model"])[0])

# %% [markdown]
# ## As a table

# %%
lab.verdicts(*runs)
