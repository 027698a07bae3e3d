# %% [markdown]
# # Recheck a model
#
# The claim for one model, at the contexts that you care about, ending in a block of Markdown for a pull request.
# An interrupted sweep goes on where it stopped: run the notebook again with the same parameters.

# %% tags=["parameters"]
source = "live"  # or the folder of a run, to write it up again
model = "tiny-dsa"
engine = "reference"  # or "vllm", with a model of `kvlab models`, a folder with a config.json, or ORG/NAME
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
contexts = [256, 1024]  # tokens of KV; for a GPU e.g. [1024, 8192, 100000]
phases = ["decode", "hit"]
batch = [2]
query = 16  # tokens that a hit or a chunk computes a request; None: 2,048 over the batch
arms = ["random"]
margin = 0.03  # declared before anything is measured
mode = "isolated"  # "sustained", or "both", as clocks under a lone step and under load differ
rounds = 8  # None: a pilot of each case decides
smoke = False  # one context, 6 rounds

# %%
from kvlab import lab, plots
from kvlab.report import markdown_summary

lab.setup()
(run,) = lab.stored(source) or [
    lab.measure(
        "05_recheck_a_model",
        "sweep",
        model,
        engine,
        engine_options=options,
        sweep={"contexts": contexts[:1] if smoke else contexts, "phases": phases, "batch": batch, "query": query},
        arms=arms,
        margin=margin,
        mode=mode,
        rounds=6 if smoke else rounds,
    )
]
lab.watermark(run)

# %%
plots.plot_gaps(run.verdicts)[0]

# %%
lab.verdict_table(run)

# %% [markdown]
# ## For the pull request

# %%
print(markdown_summary(run))
