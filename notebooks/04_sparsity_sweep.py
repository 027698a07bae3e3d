# %% [markdown]
# # The gap against sparsity
#
# Sparse attention chooses `topk` tokens by score. Zero KV makes all scores equal, which is the slow path of a top-k
# kernel; random KV scatters the choice, which costs the gather. So the gap has parts of either sign, and moves with
# top-k and with the share of tokens that are zero.

# %% tags=["parameters"]
source = "committed"  # runs of an H200 in this repository, where there are any; "live": sweep here, with what follows
model = "tiny-dsa"
engine = "reference"  # or "vllm", e.g. with model = "deepseek-v3.2-6l"
context = 2048  # tokens of KV
phases = ["decode"]
batch = [4]
topk = [64, 256, 1024]
zero_fractions = [0.25, 0.5, 0.75]
margin = 0.03
mode = "isolated"
rounds = 8
smoke = False  # two values each, 6 rounds
