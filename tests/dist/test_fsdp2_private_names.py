"""The private names of FSDP2 that ``zero/_fsdp2.py`` uses; a failure says what this torch has changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import run_ranks
from thalweg.zero.fsdp2 import private_api

GROUP = (
    "fsdp_params",
    "is_sharded",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "comm_ctx",
    "_training_state",
    "_to_unsharded",
    "_to_sharded",
    "post_backward",
    "_orig_dtype",
    "_reduce_dtype",
    "finalize_backward",
)
PARAM = (
    "sharded_param",
    "_module_info",
    "padded_sharded_param_size",
    "sharded_size",
    "_sharding_spec",
    "_sharded_param_data",
    "to_sharded_dtensor",
    "_setattr_on_modules",
    "unsharded_accumulated_grad",
    "all_gather_outputs",
    "to_accumulated_grad_if_needed",
)


def _missing(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    private_api.lazy_init(model)
    (group,) = private_api.get_fsdp_groups(model)
    inner = group._inner
    missing = [f"FSDPParamGroup.{name}" for name in GROUP if not hasattr(inner, name)]
    missing += [f"FSDPParam.{name}" for name in PARAM if not hasattr(inner.fsdp_params[0], name)]
    for kind in ("module", "param_name", "shared_modules", "shared_param_names"):
        if not hasattr(inner.fsdp_params[0]._module_info, kind):
            missing.append(f"ParamModuleInfo.{kind}")
    # The home: an unsharded parameter that is there already is taken as it is, without a gather.
    home = torch.zeros(4, 4)
    group.params[0].set_unsharded_storage(home)
    group.params[1].set_unsharded_storage(torch.zeros(4))
    group.params[2].set_unsharded_storage(torch.zeros(4, 4))
    group.params[3].set_unsharded_storage(torch.zeros(4))
    group.to_unsharded()
    if model[0].weight.data_ptr() != home.data_ptr():
        missing.append("FSDPParam._unsharded_param as the home")
    group.to_sharded()
    if home.untyped_storage().size() == 0:
        missing.append("to_sharded() that leaves the home alone")
    return missing


def test_this_torch_has_the_names_that_are_used():
    assert run_ranks(_missing, 2) == [[], []]
