# %% [markdown]
# # The gap against context length
#
# Does the claim hold at 1K tokens of context and at 100K, for a decode and for a prefill after a prefix-cache hit?
# The band is the margin, the bars are 90 % intervals.
#
# By default this shows runs of an H200 that come with the repository; the watermark says what is shown.

# %% tags=["parameters"]
source = "committed"  # "live": sweep here, with what follows; or the folder of a run
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "llama-3.1-8b"
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
contexts = [256, 1024, 2048]  # tokens of KV; for a GPU e.g. [1024, 8192, 32768, 100000]
phases = ["decode", "hit"]  # also "verify", "prefill", "chunk"
batch = [2]
query = 16  # tokens that a hit or a chunk computes a request; None: 2,048 over the batch
margin = 0.03
mode = "isolated"  # or "sustained"
rounds = 10
smoke = False  # two contexts, 6 rounds

# %%
from IPython.display import display

from kvlab import lab, plots

lab.setup()
runs = lab.stored(source, f"sweep-*-{mode}", f"vllm-*-{mode}") or [
    lab.measure(
        "03_context_sweep",
        "sweep",
        model,
        engine,
        engine_options=options,
        sweep={"contexts": contexts[:2] if smoke else contexts, "phases": phases, "batch": batch, "query": query},
        margin=margin,
        mode=mode,
        rounds=6 if smoke else rounds,
    )
]
lab.watermark(*runs)

# %%
for run in runs:
    display(plots.plot_context_sweep(run.gaps, title=lab.title(run))[0])

# %% [markdown]
# ## The verdicts

# %%
lab.verdict_table(*runs)
