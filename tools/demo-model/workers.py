"""A handful of single-threaded training processes that share one set of weights.

Each worker computes its own gradients and updates the shared weights in place
without waiting for the others.  Updates may interleave, which does little harm
with two or three workers, and no worker ever idles on a busy machine.
"""

import torch
import torch.multiprocessing as mp


def _start(rank, function, shared, args):
    torch.set_num_threads(1)
    function(rank, shared, args)


def launch(function, world, shared, args):
    """Run `function(rank, shared, args)` in `world` processes and wait for them.

    `shared` is a dictionary of modules whose weights all workers see.
    """
    for module in shared.values():
        module.share_memory()
    mp.spawn(_start, args=(function, shared, args), nprocs=world)
