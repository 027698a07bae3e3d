# %% [markdown]
# # The gap against context length
#
# Does the claim hold at 1K tokens of context and at 100K, for a decode and for a prefill after a prefix-cache hit?
# The gap is how much longer a step takes when the KV cache holds random values in place of zeros. The band is the
# margin, the bars are 90 % intervals; a step is timed alone (`isolated`) and back to back (`sustained`).

# %% tags=["parameters"]
source = "committed"  # "live": sweep here, with what follows; or a folder with runs
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "llama-3.1-8b"
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
contexts = [256, 1024, 2048]  # tokens of KV; for a GPU e.g. [1024, 8192, 32768, 100000]
phases = ["decode", "hit"]  # also "verify", "prefill", "chunk"
batch = [2]
query = 16  # tokens that a hit or a chunk computes a request; None: 2,048 over the batch
margin = 0.03
mode = "isolated"  # or "sustained", or "both"
rounds = 10
smoke = False  # two contexts, 6 rounds

# %%
from IPython.display import Markdown, display

from kvlab import evidence, lab, lab_tables, pace, plots

lab.setup()
runs = lab.stored(source, lab.in_vllm) or [
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
gaps = evidence.gap_rows(runs)
# With real routing over made-up gates a gap is about the experts: in 06_why.
shown = evidence.context_gaps(gaps[gaps["routing"] != "real"])
display(Markdown(lab.origin(*runs)))
lab.watermark(*runs)

# %% [markdown]
# ## By model and phase
#
# Panels of a row share their scale. A line is of one batch where the runs have several contexts of it;
# a hit computes 2,048 tokens, at most half of its context.

# %%
plots.plot_context_panels(pace.drawn(shown))[0]

# %% [markdown]
# ## In numbers

# %%
lab_tables.context_table(shown)
