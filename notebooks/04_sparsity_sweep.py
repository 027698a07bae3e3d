# %% [markdown]
# # The gap against sparsity
#
# Sparse attention picks `topk` tokens by their scores. Zero KV ties all scores, which a top-k kernel may find hard;
# random KV scatters the picks, which costs the gather. So the gap has parts of either sign, and moves with top-k and
# with the share of tokens that are zero.
#
# By default this shows runs of an H200 that come with the repository, where they hold such a sweep, and else measures
# on the embedded engine; the watermark says which.

# %% tags=["parameters"]
source = "committed"  # "live": sweep here, with what follows; or the folder of a run
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "deepseek-v3.2-6l"
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
contexts = [512]  # tokens of KV
phases = ["decode"]
batch = [2]
topk = [32, 128, 256]  # a load of the model each
zero_fractions = [0.25, 0.5, 0.75]  # an arm each, between random (0) and zeros (1)
margin = 0.03
mode = "isolated"  # or "sustained"
rounds = 6
smoke = False  # two of each

# %%
from IPython.display import display

from kvlab import lab, plots

lab.setup()
by_topk = lab.stored(source, f"*-{mode}", having=lambda run: run.gaps["topk"].nunique() > 1)
by_zeros = lab.stored(source, f"*-{mode}", having=lambda run: run.gaps["arm"].str.contains("zero_fraction").any())
if not (by_topk and by_zeros):
    most = 2 if smoke else None
    by_topk = by_zeros = [
        lab.measure(
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
    ]
lab.watermark(*{run.path: run for run in (*by_topk, *by_zeros)}.values())

# %% [markdown]
# ## By top-k

# %%
for run in by_topk:
    display(plots.plot_topk_sweep(run.gaps, title=lab.title(run))[0])

# %% [markdown]
# ## By the share of zero tokens
#
# At 0 all tokens are random, at 1 none.

# %%
for run in by_zeros:
    display(plots.plot_zero_fraction(run.gaps, title=lab.title(run))[0])

# %% [markdown]
# ## The parts: selection and attention
#
# Of each run the case with the largest gap: the time of a step by the role of its kernels, and what each role adds.

# %%
for run in by_topk:
    if len(run.kernels):
        case, in_mode = lab.profiled_case(run)
        display(plots.plot_parts(run.kernels, case=case, mode=in_mode, arms=["zeros", "random"])[0])

# %% [markdown]
# ## The verdicts

# %%
lab.verdict_table(*by_topk)
