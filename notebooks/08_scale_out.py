# %% [markdown]
# # Several workers and a kill
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](COLAB_URL)
#
# Keras 3 does not train on several TensorFlow workers by itself: `fit` fails, or
# workers silently draw the same dropout masks and see examples twice.
# [tfamp](REPOSITORY_URL) makes `MultiWorkerMirroredStrategy` train as one device does.
# Two processes on this machine stand for two machines here: nothing else differs.
#
# You will learn
#
# - what a program needs so that it runs alone and on many workers,
# - that two workers end with the weights that one has,
# - what happens when a worker is killed, and how training goes on to the bit.
#
# It takes three minutes on a CPU. (Two processes cannot share one GPU well, so this
# notebook leaves the GPU alone.)

# %%
# %pip install -q "tfamp[data,report] @ git+REPOSITORY_URL"

# %% tags=["parameters"]
EPOCHS = 40

# %%
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## A program for one worker or many
#
# `strategy()` reads what the launcher set (`TF_CONFIG`, Slurm),
# and has Keras train on it; `shard("auto")` gives each worker its own examples, and
# `Resume` keeps what is needed to go on. `tfamp.enable` may stand beside them, as ever.
# First the model, in a file of its own:

# %%
MODEL = """
import keras
from sklearn.datasets import load_digits

def build():
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(512, activation="relu")
    head = keras.layers.Dense(10, activation="softmax")
    model = keras.Sequential([keras.Input((64,)), hidden, head])
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = load_digits(return_X_y=True)
    return model, ((x / 16).astype("float32")[:1024], y[:1024])
"""
_ = (folder / "digits.py").write_text(MODEL)

# %%
TRAIN = f"""
import sys, numpy as np, tfamp
strategy = tfamp.distribute.strategy()
import digits
with strategy.scope():
    model, (x, y) = digits.build()
data = tfamp.data.Pipeline.from_arrays(x, y).shard("auto").shuffle(seed=1).batch(64)
resume = tfamp.callbacks.Resume(sys.argv[1], every_steps=20)
model.fit(data.build(), epochs={EPOCHS}, shuffle=False, verbose=0, callbacks=[resume])
np.savez(sys.argv[2], *model.get_weights())
"""
_ = (folder / "train.py").write_text(TRAIN)

# %% [markdown]
# ## Alone, and with two workers
#
# A launcher sets `TF_CONFIG` on each machine: who takes part, and which one this is.


# %%
def start(run, num_workers):
    """Starts the program once for each worker and returns the processes."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_workers)]
    hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    [each.close() for each in sockets]
    started = []
    for i in range(num_workers):
        task = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": i}}
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        env.update({"TF_CONFIG": json.dumps(task)} if num_workers > 1 else {})
        command = [sys.executable, "train.py", f"{run}-states", f"{run}-{i}.npz"]
        errors = open(folder / f"{run}-{i}.log", "w")
        started.append(subprocess.Popen(command, cwd=folder, env=env, stderr=errors))
    return started


# %%
def weights(run, worker=0):
    """Returns the weights that a worker ended with."""
    with np.load(folder / f"{run}-{worker}.npz") as file:
        return [file[name] for name in file.files]


def distance(ours, theirs):
    """Returns the largest difference of two lists of weights."""
    return max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))


# %%
for run, num_workers in {"alone": 1, "two": 2}.items():
    began = time.monotonic()
    statuses = [each.wait() for each in start(run, num_workers)]
    print(f"{run}: exit statuses {statuses} after {time.monotonic() - began:.0f} s")
print("two workers differ by", distance(weights("two", 0), weights("two", 1)))

# %% [markdown]
# Both workers hold the same weights. Are they those of one device? Not of *this* run
# alone, as the batches were put together in another order: each worker shuffles its own
# part.
#
# ## A worker is killed
#
# `kill -9` in the middle: no exception, no goodbye, as when a machine goes away.

# %%
processes = start("killed", 2)
states = folder / "killed-states"
while len(list(states.rglob("*"))) < 4 and processes[1].poll() is None:
    time.sleep(0.05)
processes[1].send_signal(signal.SIGKILL)
began = time.monotonic()
print("the other one ended with", processes[0].wait(), end=" ")
print(f"after {time.monotonic() - began:.1f} s, and said:")
said = (folder / "killed-0.log").read_text().splitlines()
print(*[line[:160] for line in said if "worker 1" in line.lower()][-1:])

# %% [markdown]
# The survivor does not hang: it ends and names who is missing. A launcher starts all of
# them again (Slurm, Kubernetes and Ray do so by themselves). They go on at the newest
# step that *both* have kept.

# %%
statuses = [each.wait() for each in start("killed", 2)]
print("exit statuses", statuses)
print("never killed - killed and resumed:", distance(weights("two"), weights("killed")))

# %% [markdown]
# Zero: not close, but equal in every bit, as if nothing had happened.
#
# What more devices bring, `tfamp.callbacks.Throughput` tells: train with one, then with
# all of them, and divide the examples a second. Half the bytes go over the wire with
# `tfamp.LossScaleOptimizer(reduce_dtype="bfloat16")`.
#
# ## Where to go next
#
# - [Distributed training](REPOSITORY_URL/blob/main/docs/scale.md): launchers,
#   input for each worker, half-precision gradients, Ray.
# - [A recipe for all launchers](REPOSITORY_URL/blob/main/recipes/train_workers.py), and
#   [jobs](REPOSITORY_URL/tree/main/deploy) for Slurm, Kubernetes and Vertex AI.
# - [Inference](REPOSITORY_URL/blob/main/notebooks/09_inference.ipynb): what to do with
#   the trained model.
