# %% [markdown]
# # The gap against sparsity
#
# Sparse attention picks `topk` tokens by their scores. Zero KV ties all scores, which a top-k kernel may find hard;
# random KV scatters the picks, which costs the gather. So the gap has parts of either sign, and moves with top-k and
# with the share of tokens that are zero.
#
# What was measured on an H200 and comes with the repository is shown; what was not is measured here on the embedded
# engine. Each section says which.

# %% tags=["parameters"]
source = "committed"  # "live": sweep here, with what follows; or a folder with runs
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "deepseek-v3.2-6l"
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
contexts = [512]  # tokens of KV
phases = ["decode"]
batch = [2]
topk = [32, 128, 256]  # a load of the model each
zero_fractions = [0.25, 0.5, 0.75]  # an arm each, between random (0) and zeros (1)
margin = 0.03
mode = "isolated"  # or "sustained", or "both"
rounds = 6
smoke = False  # two of each

# %%
from IPython.display import Markdown, display

from kvlab import evidence, lab, lab_tables, pace, plots

lab.setup()
by_topk = lab.stored(source, lambda run: run.gaps["topk"].nunique() > 1)
by_zeros = lab.stored(source, lambda run: run.gaps["arm"].str.contains("zero_fraction").any())
if not (by_topk and by_zeros):
    most = 2 if smoke else None
    live = lab.measure(
        "04_sparsity_sweep",
        "sweep",
        model,
        engine,
        engine_options=options,
        sweep={
            "contexts": contexts,
            "phases": phases,
            "batch": batch,
            "topk": topk[:most],
            "zero_fractions": zero_fractions[:most],
        },
        margin=margin,
        mode=mode,
        rounds=rounds,
        explain=True,
    )
    by_topk, by_zeros = by_topk or [live], by_zeros or [live]
lab.watermark(*{run.path: run for run in (*by_topk, *by_zeros)}.values())

# %% [markdown]
# ## By top-k
#
# The whole step, and, where its kernels were profiled, what each kind of kernel adds: parts of the step's time.

# %%
# A model's own top-k is in its other runs, too.
display(Markdown(lab.origin(*by_topk)))
plots.plot_topk_panels(pace.drawn(evidence.sparsity_gaps([*by_topk, *by_zeros], "topk")))[0]

# %% [markdown]
# ## By the share of zero tokens
#
# From all random to all zero, where there is no gap by definition.

# %%
display(Markdown(lab.origin(*by_zeros)))
plots.plot_zero_panels(pace.drawn(evidence.sparsity_gaps(by_zeros, "zero_fraction")))[0]

# %% [markdown]
# ## The parts at the largest gap
#
# Of each model the profiled case with the largest gap: the time of a step by kind of kernel, and what each adds.

# %%
for run, case, in_mode in evidence.profiled_cases(by_topk):
    display(plots.plot_parts(run.kernels, case=case, mode=in_mode, arms=["random"])[0])

# %% [markdown]
# ## Other contents
#
# Shapes of the indexer's scores, and what the model itself writes (`prefill`), against zeros.

# %%
others = lab.stored(source, lambda run: len(evidence.other_arms([run])))
if others:
    display(Markdown(lab.origin(*others)))
    rows = lab_tables.with_places(evidence.other_arms(others))
    display(
        plots.plot_claim(rows, group="place", label="arm", title="Gap of random and other contents against zero KV")[0]
    )
else:
    display(Markdown("Not measured on this card yet."))
