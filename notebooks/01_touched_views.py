# %% [markdown]
# # What a step may write
#
# A forward step writes the KV of its own tokens: the tail of each request's attention blocks, and the whole of its
# recurrent states. Everything else in the cache is only read. kvlab computes these *touched views* from the geometry
# of the cache, saves them, and brings them back before every replay. Here is what they are for each family of models,
# and the proof from the bytes themselves.

# %% tags=["parameters"]
models = ["tiny-dense", "tiny-swa", "tiny-mla", "tiny-dsa", "tiny-hybrid"]  # `kvlab models` lists more
engine = "reference"  # or "vllm", with models of its own
case = "mix=64@1000,3*1@700,2*4@300:3"  # a prefix-cache hit, three decodes, two verifications of three drafts
smoke = False  # only the first model

# %%
from contextlib import closing

import pandas as pd
from IPython.display import display

import kvlab
from kvlab import lab, plots

lab.setup()
lab.watermark()

# %% [markdown]
# ## By block and by byte
#
# One row per request: the blocks that it owns, and those of them that the step may write. Below each picture the same
# as numbers: the bytes to save and to restore, against all that the case owns.

# %%
proofs = []
for model in models[:1] if smoke else models:
    with closing(kvlab.load_engine(model, engine)) as loaded:
        step = loaded.prepare(kvlab.parse_case(case))
        blocks, table = kvlab.touched_blocks(step), kvlab.touched_table(step)
        step.close()
        proofs += kvlab.verify(loaded, [case])
    display(plots.plot_views(blocks, title=model)[0], table.drop(columns=["shape", "factor", "views"]))

# %% [markdown]
# ## The proof
#
# All bytes of the cache before and after a step, twice, from different random contents. `bytes_outside` counts changed
# bytes that lie in no touched view. `tightness` is how much of the views a step does write, 1 where they have no slack.
# `reads_unwritten` says what the output owes to bytes that hold no token of the case.

# %%
columns = ["model", "ok", "bytes_written", "bytes_outside", "bytes_touched", "bytes_cache", "tightness"]
pd.DataFrame([proof.as_dict() for proof in proofs])[[*columns, "reads_unwritten"]]
