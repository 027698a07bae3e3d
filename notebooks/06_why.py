# %% [markdown]
# # Why there is a gap
#
# Three causes are told apart: *selection* (top-k and gather do other work), *clocks* (the same cycles at another
# clock, as random values switch more transistors), and *routing* (tokens go to other experts).
#
# By default this shows runs of an H200 that come with the repository, where they hold kernels, and else measures on
# the embedded engine, whose kernels are the operators of PyTorch; the watermark says which.

# %% tags=["parameters"]
source = "committed"  # "live": check here, with what follows; or the folder of a run
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "deepseek-v3.2-6l"
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
case = "hit=32@1024"
margin = 0.03
mode = "isolated"  # or "sustained"
rounds = 8
smoke = False  # 6 rounds

# %%
from contextlib import closing

import pandas as pd
from IPython.display import Markdown, display

import kvlab
from kvlab import lab, plots
from kvlab.kernel_gaps import kernel_gap_table

lab.setup()
runs = lab.stored(source, f"*-{mode}", having=lambda run: len(run.kernels)) or [
    lab.measure(
        "06_why",
        "check",
        model,
        engine,
        engine_options=options,
        cases=[case],
        margin=margin,
        mode=mode,
        rounds=6 if smoke else rounds,
        explain=True,
    )
]
lab.watermark(*runs)

# %% [markdown]
# ## In a sentence
#
# Of each run the profiled case with the largest gap.

# %%
found = [(run, *lab.profiled_case(run)) for run in runs]
for run, name, of_mode in found:
    display(Markdown(f"**{run.study['model']}, {name}**: {run.verdict_of(name, of_mode)['cause']['sentence']}"))

# %% [markdown]
# ## Kernel by kernel
#
# What each role adds to the gap, then the kernels that moved most. The parts add up to the total.

# %%
for run, name, of_mode in found:
    kernels = run.kernels[(run.kernels["case"] == name) & (run.kernels["mode"] == of_mode)]
    display(plots.plot_parts(kernels, arms=["zeros", "random"])[0], plots.plot_kernels(kernels)[0])
    display(kernel_gap_table(kernels, by="role").round(2))

# %% [markdown]
# ## Watts and clocks
#
# A step that draws more power under random KV runs at a lower clock once it meets the limit of the board.

# %%
for run, name, of_mode in found:
    samples = run.samples_of(name, of_mode)
    display(plots.plot_clocks(samples)[0] if "sm_mhz" in samples else Markdown("No clocks: measured without a GPU."))

# %% [markdown]
# ## Selection
#
# What sparse attention picked under each arm: `neighbours` is the share of picks that directly follow the one before,
# `spread` how many pages they touch against the fewest that could hold them.

# %%
for run, name, of_mode in found:
    selection = run.verdict_of(name, of_mode).get("selection")
    display(pd.DataFrame(selection).T if selection else Markdown(f"{run.study['model']} picks no tokens."))

# %% [markdown]
# The picks themselves, on the embedded engine: ties are won by neighbours.

# %%
with closing(kvlab.load_engine("tiny-dsa", "reference", seed=0)) as loaded:
    step = loaded.prepare(kvlab.parse_case("hit=32@1024"))
    table = lab.picks(step, ["zeros", "random"])
plots.plot_selection(table, context=1024)[0]

# %% [markdown]
# ## Routing
#
# With real routing and made-up gates the experts follow the KV contents, and a gap is about them. `none` is a model
# without experts; `balanced` sends the same tokens to the same experts whatever the KV.

# %%
pd.concat([run.verdicts[["model", "case", "mode", "routing", "verdict"]] for run in runs], ignore_index=True)
