"""Batch sizes that many numbers of devices divide."""

from deepspeed.elasticity import compute_elastic_config

ds_config = {
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 2000,
        "micro_batch_sizes": [2, 4, 6],
        "min_gpus": 1,
        "max_gpus": 10000,
        "min_time": 20,
        "version": 0.1,
    }
}
batch, gpus = compute_elastic_config(ds_config, target_deepspeed_version="0.19.8")
batch64, _, micro = compute_elastic_config(ds_config, target_deepspeed_version="0.19.8", world_size=64)
report = {"batch": batch, "count": len(gpus), "first": gpus[:6], "at 64": [batch64, micro]}
