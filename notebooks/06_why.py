# %% [markdown]
# # Why there is a gap
#
# Three causes are told apart: *selection* (top-k and gather do other work), *clocks* (the same cycles at another
# clock, as random values switch more transistors), and *routing* (tokens go to other experts).

# %% tags=["parameters"]
source = "committed"  # "live": check here, with what follows; or a folder with runs
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "deepseek-v3.2-6l"
options = {}  # of the engine, e.g. {"num_kv_blocks": 4096}
case = "hit=32@1024"
margin = 0.03
mode = "isolated"  # or "sustained", or "both"
rounds = 8
smoke = False  # 6 rounds

# %%
from contextlib import closing

from IPython.display import Markdown, display

import kvlab
from kvlab import evidence, lab, lab_tables, plots
from kvlab.provenance import power_limit

lab.setup()
runs = lab.stored(source, lambda run: len(run.kernels)) or [
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
display(Markdown(lab.origin(*runs)))
lab.watermark(*runs)

# %% [markdown]
# ## In a sentence
#
# Every step whose kernels were profiled.

# %%
lab_tables.cause_table(runs)

# %% [markdown]
# ## Kernel by kernel
#
# Of each model the profiled step with the largest gap: time by kind of kernel and what each adds to the gap, then the
# kernels that moved most. The parts add up to the total.

# %%
found = evidence.profiled_cases(runs)
for run, name, of_mode in found:
    kernels = run.kernels[(run.kernels["case"] == name) & (run.kernels["mode"] == of_mode)]
    display(Markdown(f"### {run.study['model']}, {name}, {of_mode}"))
    display(plots.plot_parts(kernels, arms=["random"])[0], lab_tables.kernel_table(kernels))

# %% [markdown]
# ## Watts and clocks
#
# A step that draws more power under random KV runs at a lower clock once it meets the limit of the board.

# %%
readings, limit = evidence.readings(found), power_limit(run.provenance for run in runs)
sensed = "sm_mhz" in readings
display(plots.plot_clocks(readings, power_limit_watts=limit)[0] if sensed else Markdown("No clocks without a GPU."))

# %% [markdown]
# ## Selection
#
# What sparse attention picked under zeros and then under random KV: `neighbours` is the share of picks that directly
# follow the one before, `spread` how many pages they touch against the fewest that could hold them.

# %%
selected = lab_tables.selection_table(found, lab.records(source, "selection"))
display(Markdown("None of these models picks tokens.") if selected is None else selected)

# %% [markdown]
# The picks themselves, live on the embedded engine: ties are won by neighbours.

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
routed = lab.stored(source, lab.in_vllm) or runs
display(Markdown(lab.origin(*routed)))
lab_tables.routing_table(routed, lab.records(source, "loads"))
